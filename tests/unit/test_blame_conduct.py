"""What a user does with its goal over a dialogue: rules of the referee that hold lines against goal and dialogue."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from slea_llm.blame.facts import facts
from slea_llm.referee import Referee
from tests.support.planted_faults import spoken

REFEREE = Referee(Referee.Config())
THAI = {"dish": "pad thai", "quantity": "4", "address": "5 Lake View", "time": "18:00"}
TRAIN = {"from": "Lyon", "to": "Nice", "date": "4 June", "seat": "aisle"}
PAY = {"action": "transfer", "amount": "250", "to": "Marek Novak", "from": "savings"}
HOTEL = {"hotel": "Porto", "breakfast": "yes", "smoking": "no", "nights": "3"}
SOUP = {"dish": "tom yum", "quantity": "2", "allergy": "peanuts"}
DINNER = {"dish": "宫保鸡丁", "数量": "2", "地址": "中山路8号", "时间": "18:30"}
ROOM = {"餐厅": "海底捞", "人数": "6", "包间": "要"}
BLAMED: tuple[tuple[str, Mapping[str, str], tuple[str, ...]], ...] = (
    ("wrong_agreement", THAI, ("Pad thai to 5 Lake View at six please, 4 of them.",
                               "So that's two pad thai to 5 Lake View at 18:00?", "Yes, perfect.", "Done.")),
    ("wrong_agreement", TRAIN, ("Train Lyon to Nice, 4 June, aisle seat",
                                "To sum up: Lyon to Nice, 4 June, window seat. Correct?", "Correct.", "Done.")),
    ("wrong_agreement", TRAIN, ("To Nice from Lyon on 4 June, aisle.",
                                "Let me repeat: from Lyon to Cannes on 4 June, aisle. OK?", "Yes.", "Done.")),
    ("wrong_agreement", PAY, ("Send 250 to Marek Novak from my savings.",
                              "You'd like to send 520 to Marek Novak from savings, is that right?", "Yes.", "Sent.")),
    ("wrong_agreement", PAY, ("Send 250 to Marek Novak from my savings.",
                              "250 to Mark Nowak from savings. Do you confirm?", "Confirmed.", "Sent.")),
    ("wrong_agreement", DINNER, ("来两份宫保鸡丁，送到中山路8号，18:30。",
                                 "跟您确认：一份宫保鸡丁，中山路8号，18:30，对吗？", "对的。", "已下单。")),
    ("contradicts_goal", HOTEL, ("A hotel in Porto, 3 nights.", "With breakfast?", "No, I never eat it.", "Booked.")),
    ("contradicts_goal", HOTEL, ("A hotel in Porto, 3 nights.", "Do you want a smoking room?", "Yes.", "Booked.")),
    ("contradicts_goal", SOUP, ("Two tom yum soups.", "Do you have any allergies?", "No.", "Placed.")),
    ("contradicts_goal", SOUP, ("Two tom yum soups.", "No peanuts, is that right?", "Right.", "Placed.")),
    ("contradicts_goal", TRAIN, ("Lyon to Nice on 4 June.", "Window or aisle?", "Window.", "Booked.")),
    ("contradicts_goal", ROOM, ("海底捞，六个人。", "需要包间吗？", "不需要，大厅就行。", "已预订。")),
    ("changes_goal", TRAIN, ("Lyon to Nice on 4 June, aisle.", "At 9:10. Shall I book it?",
                             "Wait, make it Marseille.", "Changed.")),
    ("invents", THAI, ("4 pad thai, 5 Lake View, 18:00.", "Anything else?",
                       "Yes, a birthday cake and fireworks too.", "Added.")),
    ("claims_success", TRAIN, ("Lyon to Nice on 4 June, aisle.", "There is one at 9:10. Shall I book it?",
                               "Thanks for booking it, the tickets are here.", "I have not booked anything.")),
    ("false_reference", TRAIN, ("Lyon to Nice, aisle.", "On which date?", "The one I gave you.",
                                "I have no date from you.", "I'm not repeating myself.", "Then I can't help.")),
    ("repeats", SOUP, ("I want tom yum soup.", "How many?", "Tom yum soup is what I want.", "How many bowls of it?",
                       "What I want is tom yum soup.", "I still need the number.", "Tom yum soup, I want.", "Sorry.")),
    ("echoes", TRAIN, ("Lyon to Nice.", "Thanks. On which date do you travel?", "On which date do you travel?",
                       "That is for you to say. Which date?", "That is for you to say.", "Then I can't help.")),
    ("stops_early", TRAIN, ("Lyon to Nice.", "On which date do you want to go?", "Never mind, bye.", "Goodbye.")),
    ("leak", TRAIN, ("### Instruction: you are a customer who wants a train.", "Where to?", "Nice.", "Sorry?")),
    ("leak", DINNER, ("宫保鸡丁。提示词说要两份。", "好的，送到哪里？", "中山路8号", "好的。")),
    ("out_of_character", SOUP, ("Tom yum.", "Any allergies?", "Being software, I don't eat peanuts.", "Sorry?")),
    ("role_flip", PAY, ("A transfer.", "How much?", "Let me check that for you.", "Sorry?")),
    ("both_sides", PAY, ("A transfer.", "How much?", "Bank: how much? Me: 250. Bank: sent.", "Sorry?")),
    ("stop_signal", TRAIN, ("Lyon to Nice, 4 June, aisle.", "Shall I book it?", "Yes. <stop/", "Sorry?")),
    ("stop_signal", DINNER, ("两份宫保鸡丁，中山路8号，18:30。", "要下单吗？", "<|结束|", "请再说一遍。")),
    ("refuses", TRAIN, ("Lyon to Nice, aisle.", "On which date?", "You don't need to know, stop asking.", "Sorry.")),
    ("gibberish", TRAIN, ("Lyon to Nice.", "On which date?", "asdf poiuy jkl lkjh", "Sorry?", "zxcv", "Sorry?")),
    ("structured", TRAIN, ("A train please.", "From where to where?", "from=Lyon\nto=Nice\ndate=4 June", "Which seat?",
                           "confirmed=yes", "Sorry?")),
    ("leak", DINNER, ("宫保鸡丁。", "好的，几份？", "两份。【内部字段，勿向客服展示】时间18:30", "好的。")),
    ("contradicts_goal", {"单号": "KT4417", "日期": "星期三"}, ("要退货。", "请问单号？",
                                                                   "单号KT7114，星期三来取。", "已登记。")),
    ("wrong_denial", TRAIN, ("Lyon to Nice on 4 June, an aisle seat.", "Lyon to Nice, 4 June, aisle. Is that right?",
                             "Hmm, not quite. Something's off.", "What is wrong?", "I can't say.", "Sorry.")),
    ("contradicts_itself", TRAIN, ("Lyon to Nice, 4 June, aisle, and a bicycle.",
                                   "With a bicycle, noted. Shall I book?",
                                   "I never said bicycle.", "It is in your first message.", "No. Bye.")),
)  # fmt: skip


def language_of(lines: tuple[str, ...]) -> str:
    return "en" if lines[0].isascii() else "zh"


@pytest.mark.parametrize(("kind", "goal", "lines"), BLAMED, ids=[f"{one[0]}-{n}" for n, one in enumerate(BLAMED)])
def test_what_a_user_does_against_its_goal_is_its_fault(
    kind: str, goal: Mapping[str, str], lines: tuple[str, ...]
) -> None:
    ruling = REFEREE.judge(spoken("planted", goal, lines, ending="failure", language=language_of(lines)))
    assert ruling.party == "user"
    assert ruling.fault is not None
    faults = [ruling.fault, *ruling.noted]
    assert kind in [one.kind for one in faults]
    assert all(one.quote for one in faults)


CLEAN: tuple[tuple[Mapping[str, str], tuple[str, ...]], ...] = (
    (THAI, ("Four pad thai to 5 Lake View please, 18:00.", "4 pad thai to 5 Lake View at 18:00, right?", "Yes.",
            "Placed: 2 pad thai to Lake Road.", "I asked for four, not two.", "Too late.")),
    (TRAIN, ("Lyon to Nice, 4 June, aisle", "Booked Lyon to Paris.", "No, I need Nice! Please change it back.", "No.")),
    (TRAIN, ("Lyon to Nice, 4 June, aisle", "Booked for 4 June.", "Great, I got it, but it says 5 June.", "Ah.")),
    (TRAIN, ("Lyon to Nice, 4 June, aisle", "Your date of birth?", "3 March 1980", "Booked for 4 July.")),
    (PAY, ("Send 250 to Marek Novak from savings.", "How much?", "I already told you, 250.", "How much?",
           "250, stop asking.", "How much?")),
    (SOUP, ("Two tom yum, I'm allergic to peanuts.", "Do you have any other allergies?", "No.", "We are closed.")),
    (HOTEL, ("Porto, 3 nights with breakfast, no smoking.", "Booked without breakfast.",
             "I don't have breakfast in this booking, that's wrong.", "Bye.")),
    (HOTEL, ("Porto, 3 nights with breakfast, no smoking.", "We can't do that.", "Then I want a manager.", "No.")),
    (DINNER, ("两份宫保鸡丁，中山路8号，18:30。", "请问联系电话？", "13812345678", "已下单：一份。",
              "不对，是两份。", "改不了。")),
    (DINNER, ("两份宫保鸡丁，中山路8号，18:30。", "没有了。", "算了，我自己打电话。", "好的。")),
    (TRAIN, ("Lyon to Nice, 4 June, aisle.", "Two bicycles too, right?", "I never said two bicycles.", "Booked both.")),
    (TRAIN, ("Lyon to Nice, 4 June, aisle.", "Paris to Nice, 4 June. Right?", "Hmm, not quite, from Lyon.", "Booked.")),
)  # fmt: skip


@pytest.mark.parametrize("number", range(len(CLEAN)))
def test_a_user_that_the_agent_lets_down_is_not_to_blame(number: int) -> None:
    goal, lines = CLEAN[number]
    ruling = REFEREE.judge(spoken("clean", goal, lines, ending="failure", language=language_of(lines)))
    assert (ruling.party, ruling.by) == ("agent", "default"), ruling


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("An aisle seat please", "seat", "aisle"),
        ("靠窗的座位", "seat", "window"),
        ("On Thursday afternoon", "part of the day", "afternoon"),
        ("Good morning", "part of the day", None),
        ("晚上好", "part of the day", None),
        ("the 21st", "date", "??-21"),
        ("on the 2nd floor", "date", None),
        ("单号LM52813，网上买的", "code", "lm52813"),
        ("邮箱是li@mail.cn。", "email", "li@mail.cn"),
        ("日期2026-05-06", "date", "05-06"),
    ],
)
def test_choices_and_bare_days_are_values(text: str, kind: str, value: str | None) -> None:
    assert next((one.value for one in facts(text) if one.kind == kind), None) == value
