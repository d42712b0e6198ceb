"""Choices of which nobody wants two at once, in English and Chinese: window or aisle, cash or card."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

CHOICES: Mapping[str, Mapping[str, str]] = {
    "part of the day": {
        "morning": r"(?<!good )\bmornings?\b|(?:早上|上午|早晨)(?!好)",
        "afternoon": r"(?<!good )\bafternoons?\b|下午(?!好)",
        "evening": r"(?<!good )\bevenings?\b|(?:晚上|傍晚)(?!好)",
    },
    "near day": {
        "today": r"\btoday\b|今天",
        "tomorrow": r"(?<!day after )\btomorrow\b|明天",
        "after tomorrow": r"\bday after tomorrow\b|后天",
        "weekend": r"\bweekend\b|周末",
    },
    "seat": {"window": r"\bwindow\b|靠窗", "aisle": r"\baisle\b|过道|走道", "middle": r"\bmiddle seat\b"},
    "bed": {
        "twin": r"\btwin\b|双床",
        "double": r"\bdouble (?:room|bed)\b|大床",
        "single": r"\bsingle (?:room|bed)\b|单人间",
    },
    "way": {"single": r"\b(?:one|1)[- ]way\b|单程", "return": r"\b(?:round[- ]trip|return ticket)s?\b|往返"},
    "class": {
        "economy": r"\beconomy\b|经济舱|二等座",
        "business": r"\bbusiness(?: class)\b|商务[舱座]",
        "first": r"\bfirst class\b|头等舱|一等座",
    },
    "size": {
        "small": r"\bsmall\b|小[份杯号]",
        "medium": r"\bmedium\b(?! (?:rare|well|spic))|中[份杯号]",
        "large": r"\blarge\b|大[份杯号]",
    },
    "heat": {
        "none": r"不辣|不要辣|免辣|\bnot spicy\b",
        "mild": r"\bmild\b|微辣",
        "middle": r"\bmedium spic|中辣",
        "hot": r"\b(?:very|extra|really) (?:hot|spicy)\b|特辣|重辣|超辣",
    },
    "sugar": {"none": "无糖|不加糖", "half": "半糖|少糖|三分糖", "full": "全糖|正常糖|多糖"},
    "ice": {"none": r"去冰|不加冰|常温|\bno ice\b", "less": "少冰", "ice": "加冰|多冰", "hot": "热饮|热的"},
    "colour": {
        name: rf"\b{name}\b|{sign}色"
        for name, sign in (
            ("red", "红"),
            ("blue", "蓝"),
            ("green", "绿"),
            ("black", "黑"),
            ("white", "白"),
            ("yellow", "黄"),
            ("grey", "灰"),
        )
    },
    "place": {
        "inside": r"\b(?:inside|indoors?)\b|室内",
        "outside": r"\b(?:outside|outdoors?|terrace)\b|室外|户外|露天",
    },
    "board": {
        "full": r"\bfull[- ]board\b|三餐全包",
        "half": r"\bhalf[- ]board\b|含两餐",
        "breakfast": r"\bbed and breakfast\b|\bb&b\b",
        "none": r"\broom[- ]only\b|\bself[- ]catering\b|不含餐",
    },
    "of repeats": {
        "first": r"\b(?:keep|take|use)s? the first\b|\bfirst (?:one )?(?:counts|wins)\b|(?:保留|算|取)第一",
        "last": r"\b(?:keep|take|use)s? the last\b|\blast (?:one )?(?:counts|wins)\b|(?:保留|算|取)最后",
    },
    "payment": {"cash": r"\bcash\b|现金", "card": r"\b(?:credit|debit) card\b|刷卡|信用卡"},
    "handing over": {
        "delivery": r"\b(?:delivery|delivered)\b|外送|送货",
        "pickup": r"\b(?:pick[- ]?up|collect it)\b|自取|自提",
    },
    "account": {
        "current": r"\b(?:current|checking) account\b|\bfrom (?:current|checking)\b|活期",
        "savings": r"\bsavings?\b(?! money)|储蓄|定期",
    },
    "remedy": {
        "refund": r"\brefund(?:ed)?\b|退款|退钱",
        "replacement": r"\b(?:replaced?|replacement|exchanged?)\b|换货|换新",
        "repair": r"\brepair(?:ed)?\b|维修|修理",
    },
}
"""Kinds of choices -> their values -> words for them."""


@lru_cache(maxsize=1)
def patterns() -> tuple[tuple[str, str, re.Pattern[str]], ...]:
    """`(kind, value, words for it)` of every choice."""
    return tuple(
        (kind, value, re.compile(words)) for kind, values in CHOICES.items() for value, words in values.items()
    )
