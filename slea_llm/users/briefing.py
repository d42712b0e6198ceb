"""A task's hidden goal in words, for a simulated user that is a language model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from slea_llm import assets
from slea_llm.errors import ConfigError
from slea_llm.types import Task
from slea_llm.wording import fragments

KEYS = frozenset(
    {
        "separator",
        "wants",
        "volunteers",
        "volunteers_nothing",
        "misstated",
        "vague",
        "patience",
        "begin",
        "silence",
        "again",
    }
)
AGENDA = frozenset({"values", "wording"})
"""Keys of `task.goal["user"]` that make it an agenda as the user `scripted` reads it."""


class Briefing:
    """The wording of one language, `data/users/goal.<code>.yaml`."""

    def __init__(self, code: str) -> None:
        """Raises ConfigError for a language without wording, and for a wording that lacks a form."""
        source = assets.find("data", f"users/goal.{code}.yaml").read_text(encoding="utf-8")
        self._forms: Mapping[str, str] = yaml.safe_load(source)
        if missing := sorted(KEYS - self._forms.keys()):
            raise ConfigError(f"data/users/goal.{code}.yaml lacks {', '.join(missing)}")
        self.begin, self.silence, self.again = (self._forms[name] for name in ("begin", "silence", "again"))

    def goal(self, task: Task, *, stop: str) -> str:
        """The goal in words.

        `task.goal["user"]["story"]` is taken as it is; an agenda (see the user `scripted`) is told value by value; any
        other goal is given as YAML, without the parts that only programs read.
        """
        user = task.goal.get("user")
        if isinstance(user, Mapping) and isinstance(user.get("story"), str):
            return str(user["story"]).strip()
        if isinstance(user, Mapping) and user.keys() >= AGENDA:
            return "\n".join(self._agenda(user, stop))
        return str(yaml.safe_dump(_plain(task.goal), allow_unicode=True, sort_keys=False)).strip()

    def _agenda(self, agenda: Mapping[str, Any], stop: str) -> list[str]:
        values: Mapping[str, str] = agenda["values"]
        tell = _tell_forms(agenda["wording"])
        lines = [self._forms["wants"].format(told=self._told(tell, values))]
        lines += [f"- {slot}: {value}" for slot, value in values.items()]
        volunteered = {slot: values[slot] for slot in values if slot in agenda.get("volunteers", ())}
        misstated = {slot: wrong for slot, wrong in agenda.get("misstated", {}).items() if slot in values}
        if volunteered:
            first = {slot: misstated.get(slot, value) for slot, value in volunteered.items()}
            lines.append(self._forms["volunteers"].format(told=self._told(tell, first)))
        else:
            lines.append(self._forms["volunteers_nothing"])
        if misstated:
            right = {slot: values[slot] for slot in misstated}
            told = {"wrong": self._told(tell, misstated), "right": self._told(tell, right)}
            lines.append(self._forms["misstated"].format(**told))
        lines += [self._forms["vague"].format(slot=slot) for slot in agenda.get("vague", {}) if slot in values]
        if "patience" in agenda:
            lines.append(self._forms["patience"].format(count=agenda["patience"], stop=stop))
        return lines

    def _told(self, tell: Mapping[str, Any], values: Mapping[str, str]) -> str:
        known = {slot: value for slot, value in values.items() if slot in tell}
        said = fragments(tell, known, lambda forms: str(forms[0])) if known else []
        rest = [f"{slot} {value}" for slot, value in values.items() if slot not in known]
        return self._forms["separator"].join([*said, *rest])


def _tell_forms(wording: str | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(wording, str):
        wording = yaml.safe_load(assets.find("data", wording).read_text(encoding="utf-8"))
    tell = wording.get("tell", {}) if isinstance(wording, Mapping) else {}
    return tell if isinstance(tell, Mapping) else {}


def _plain(value: Any) -> Any:
    """The goal as lists and mappings, without phrasings."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items() if key != "wording"}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
