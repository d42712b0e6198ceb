"""The dialogues of a report: numbers of each, and every step with its text of as many as there is room for."""

from __future__ import annotations

import json
import math
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slea_llm.log_measures import Facts, LogMeasures, facts
from slea_llm.report.patterns import Patterns, act_of
from slea_llm.report.review import Review, length_trend, queue, standing
from slea_llm.report.sources import Scored, Source
from slea_llm.types import Message, ScoredStep, ScoredTrajectory

MOST_ROWS = 20_000
"""Dialogues with a row in the table."""
MOST_TEXTS = 2_000
"""Dialogues considered for being shown whole."""
LONGEST_TEXT = 4_000
"""Characters of one message or step that are shown; of a longer one its beginning and its end."""
MARGIN = 20_000
"""Characters beside what is shown that are searched for secrets; a private key has some 3,000."""
MOST_HARMS = 300
"""Failures listed with the text of their first harmful step."""
BINS = 24

Mend = Callable[[str], str]
"""What blanks secrets, and whatever else was asked for, in a text from a log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much goes into one report: bytes of whole dialogues, and how many at most."""

    text_bytes: int
    dialogues: int = MOST_TEXTS


@dataclass(slots=True)
class _Evaluator:
    version: str
    scored: int = 0
    unscored: int = 0
    total: float = 0.0
    why_not: Counter[str] = field(default_factory=Counter)

    def add(self, word: ScoredStep) -> None:
        if word.score is None:
            self.unscored += 1
            self.why_not[str(word.reason)] += 1
        else:
            self.scored += 1
            self.total += word.score


def collect(source: Source, evaluator: str | None, limits: Limits, mend: Mend) -> dict[str, Any]:
    """Everything that the page shows of one source, as JSON values; reads it twice and never holds it whole.

    `evaluator`: whose scores are ranked and drawn; None: the first of the log. A name that the log lacks is a KeyError.
    """
    first = _First(evaluator, mend)
    for place, (scored, credit) in enumerate(source.read()):
        first.add(place, scored, None if credit is None else dict(zip(credit.steps, credit.advantages, strict=True)))
    standings = [standing(one) for one in first.facts]
    reviews = queue(standings)
    details = _details(source, _wanted(first.facts, reviews, limits.dialogues), limits, mend, list(first.evaluators))
    rows = _kept_rows(first.facts, details, reviews)
    where = {place: number for number, place in enumerate(rows)}
    number_of = {place: number for number, place in enumerate(details)}
    return {
        "name": mend(source.name),
        "facts": json.loads(mend(json.dumps(source.facts, ensure_ascii=False))),
        "evaluator": None if first.evaluator is None else mend(first.evaluator),
        "evaluators": [
            {
                "name": mend(name),
                "version": mend(one.version),
                "scored": one.scored,
                "unscored": one.unscored,
                "mean": one.total / one.scored if one.scored else None,
                "why_not": [[mend(why), count] for why, count in one.why_not.most_common(5)],
            }
            for name, one in first.evaluators.items()
        ],
        "measures": measures(first.measures),
        "total": len(first.facts),
        "rows": [_row(first.facts[place], number_of.get(place), mend) for place in rows],
        "details": [json.loads(text) for text in details.values()],
        "review": [
            [where[one.place], round(one.weight, 3), [[why.kind, mend(why.why)] for why in one.reasons]]
            for one in reviews
            if one.place in where
        ],
        "trend": None if (trend := length_trend(standings)) is None else [trend.correlation, trend.n, trend.suspicious],
        "patterns": _mended(first.patterns.tables(), where, mend),
        "patterns_left_out": first.patterns.left_out,
        "harms": [[where.get(place, -1), *rest] for place, *rest in first.harms],
        "harm_acts": [[mend(act), count] for act, count in first.harm_acts.most_common(40)],
        "plots": plots(first.facts),
    }


class _First:
    """What the first reading counts."""

    def __init__(self, evaluator: str | None, mend: Mend) -> None:
        self.evaluator = evaluator
        self._mend = mend
        self.facts: list[Facts] = []
        self.measures = LogMeasures()
        self.patterns = Patterns()
        self.evaluators: dict[str, _Evaluator] = {}
        self.harms: list[list[Any]] = []
        self.harm_acts: Counter[str] = Counter()

    def add(self, place: int, scored: ScoredTrajectory, advantages: Mapping[tuple[int, int], float] | None) -> None:
        for name, version in scored.evaluator_versions.items():
            self.evaluators.setdefault(name, _Evaluator(version))
        if self.evaluator is None:
            self.evaluator = next(iter(scored.evaluator_versions), None)
        elif self.evaluator not in scored.evaluator_versions and place == 0:
            raise KeyError(self.evaluator)
        for word in scored.scores:
            self.evaluators.setdefault(word.evaluator, _Evaluator(word.version)).add(word)
        found = facts(scored, self.evaluator)
        self.facts.append(found)
        self.measures.add(found)
        words = scored.scores_of(self.evaluator) if self.evaluator else {}
        for step in scored.leaves():
            key = (step.turn, step.index)
            if key in words:
                advantage = None if advantages is None else advantages.get(key)
                self.patterns.add(step, words[key], place, success=found.success, advantage=advantage)
            if found.success is False and key == found.first_harm:
                self.harm_acts[act_of(step)] += 1
                if len(self.harms) < MOST_HARMS:
                    shown = [self._mend(_clipped(step.text, 240)), self._mend(_clipped(words[key].rationale, 240))]
                    self.harms.append(
                        [place, step.turn, step.index, self._mend(act_of(step)), words[key].score, *shown]
                    )


def measures(found: LogMeasures) -> dict[str, Any]:
    """The measures as JSON values."""
    lengths = found.lengths
    return {
        "dialogues": found.dialogues,
        "broken": found.broken,
        "unknown": found.unknown,
        "finished": found.finished,
        "successes": found.successes,
        "interval": found.interval,
        "turns_of_successes": lengths and lengths.successes,
        "turns_of_all": lengths and lengths.all,
        "steps": found.steps,
        "turns": found.turns,
        "repeats": found.repeats,
        "calls": found.calls,
        "tool_errors": found.tool_errors,
        "harmed": found.harmed,
        "unharmed": found.unharmed_failures,
        "terminations": dict(found.terminations.most_common()),
        "tasks": found.tasks,
        "equal_groups": found.equal_groups,
        "passes": [[row.k, row.tasks, row.pass_hat, row.pass_at] for row in found.passes()[:16]],
    }


def plots(found: Sequence[Facts]) -> dict[str, Any]:
    """Numbers of the plots, over all dialogues: scores, score by place in the dialogue, turns; by how they ended."""
    scores: dict[str, list[float]] = defaultdict(list)
    by_place: dict[str, list[list[float]]] = defaultdict(lambda: [[] for _ in range(10)])
    turns: dict[str, list[float]] = defaultdict(list)
    for one in found:
        if one.failed:
            continue
        end = {True: "success", False: "failure", None: "unknown"}[one.success]
        turns[end].append(float(one.turns))
        for place, score in enumerate(one.scores):
            if score is not None:
                scores[end].append(score)
                by_place[end][min(9, 10 * place // max(1, len(one.scores)))].append(score)
    return {
        "scores": _histogram(scores, whole=False),
        "turns": _histogram(turns, whole=True),
        "by_place": {
            end: [round(math.fsum(bin_) / len(bin_), 4) if bin_ else None for bin_ in bins]
            for end, bins in by_place.items()
        },
    }


def _histogram(values: Mapping[str, Sequence[float]], *, whole: bool) -> dict[str, Any]:
    """Lower edges of the bins, and the share of each group in them."""
    every = [value for group in values.values() for value in group]
    if not every:
        return {"edges": [], "width": 0, "shares": {}}
    low, high = min(every), max(every)
    width = max(1.0, math.ceil((high - low + 1) / BINS)) if whole else (high - low) / BINS or 1.0
    count = min(BINS, int((high - low) / width) + 1)
    shares = {}
    for end, group in values.items():
        bins = [0] * count
        for value in group:
            bins[min(count - 1, int((value - low) / width))] += 1
        shares[end] = [round(number / len(group), 5) for number in bins]
    return {"edges": [round(low + width * number, 4) for number in range(count)], "width": width, "shares": shares}


def _wanted(found: Sequence[Facts], reviews: Sequence[Review], most: int) -> list[int]:
    """Places of the dialogues to be shown whole, most wanted first: those to review, then a draw by the task's name.

    The draw is the same for every log of the same tasks, so that two runs show the same ones side by side.
    """
    first = [one.place for one in reviews]
    rest = set(range(len(found))) - set(first)
    drawn = sorted(
        rest,
        key=lambda place: (zlib.crc32((found[place].group or found[place].id).encode("utf-8", "surrogatepass")), place),
    )
    return (first + drawn)[:most]


def _kept_rows(found: Sequence[Facts], details: Mapping[int, str], reviews: Sequence[Review]) -> list[int]:
    """Places of the dialogues with a row, in the order of the log."""
    if len(found) <= MOST_ROWS:
        return list(range(len(found)))
    kept = {*details, *(one.place for one in reviews)}
    drawn = sorted(set(range(len(found))) - kept, key=lambda place: zlib.crc32(str(place).encode()))
    return sorted(kept | set(drawn[: MOST_ROWS - len(kept)]))


def _row(one: Facts, detail: int | None, mend: Mend) -> list[Any]:
    known, mean = one.known_scores, one.mean_score
    return [
        mend(_clipped(one.id, 120)),
        None if one.group is None else mend(_clipped(one.group, 120)),
        one.termination,
        one.success,
        one.outcome,
        one.turns,
        one.steps,
        one.repeats,
        one.calls,
        one.tool_errors,
        None if mean is None else round(mean, 4),
        round(min(known), 4) if known else None,
        one.first_harm,
        detail,
    ]


def _mended(tables: Mapping[str, Sequence[Sequence[Any]]], where: Mapping[int, int], mend: Mend) -> dict[str, Any]:
    """Patterns with clean names and with the example's row in place of its place in the log."""

    def example(place: tuple[int, int, int] | None) -> list[int] | None:
        return None if place is None or place[0] not in where else [where[place[0]], *place[1:]]

    return {
        name: [[mend(_clipped(row[0], 200)), *row[1:-1], example(row[-1])] for row in rows]
        for name, rows in tables.items()
    }


def _details(
    source: Source, wanted: Sequence[int], limits: Limits, mend: Mend, evaluators: Sequence[str]
) -> dict[int, str]:
    """Place -> the whole dialogue as JSON, for the most wanted that fit together, in the order of the log."""
    rank = {place: number for number, place in enumerate(wanted)}
    texts: dict[int, str] = {}
    for place, scored in enumerate(source.read()):
        if place in rank:
            texts[place] = json.dumps(_detail(scored, mend, evaluators), ensure_ascii=False, separators=(",", ":"))
    kept, left = set(), limits.text_bytes
    for place in sorted(texts, key=rank.__getitem__):
        size = len(texts[place].encode())  # mended: no half character is left
        if size <= left:
            kept.add(place)
            left -= size
    return {place: text for place, text in texts.items() if place in kept}


def _detail(one: Scored, mend: Mend, evaluators: Sequence[str]) -> dict[str, Any]:
    """`turns`: [[messages before, steps, reward, how it ended]]; a message is [role, name, text].

    A step is [index, kind, act, text, [[score, why] of every evaluator], advantage, rewards by part].
    """
    scored, credit = one
    trajectory = scored.trajectory
    words: dict[tuple[int, int, str], ScoredStep] = {(w.turn, w.step, w.evaluator): w for w in scored.scores}
    advantages = {} if credit is None else dict(zip(credit.steps, credit.advantages, strict=True))
    rewards = {} if credit is None else dict(zip(credit.steps, credit.rewards, strict=True))
    steps: dict[int, list[list[Any]]] = defaultdict(list)
    for step in scored.leaves():
        key = (step.turn, step.index)
        said = [words.get((*key, name)) for name in evaluators]
        steps[step.turn].append(
            [
                step.index,
                step.kind,
                mend(act_of(step)),
                _shown(step.text, mend),
                [None if word is None else _word(word, mend) for word in said],
                advantages.get(key),
                {mend(name): number for name, number in rewards.get(key, {}).items()},
            ]
        )
    return {
        "turns": [
            [
                [_message(message, mend) for message in turn.context],
                steps[turn.index],
                turn.reward,
                turn.finish_reason,
                turn.index,
            ]
            for turn in trajectory.turns
        ],
        "closing": [_message(message, mend) for message in trajectory.closing],
        "error": None if trajectory.error is None else _shown(trajectory.error, mend),
        "no_credit": None if credit is None or credit.why_not is None else mend(credit.why_not),
        "policy": trajectory.policy_version,
    }


def _word(word: ScoredStep, mend: Mend) -> list[Any]:
    score = None if word.score is None else round(word.score, 6)
    return [score, mend(_clipped(word.rationale if word.reason is None else word.reason, 600))]


def _message(message: Message, mend: Mend) -> list[Any]:
    calls = "".join(f"\n{call.name}({call.arguments})" for call in message.tool_calls)
    return [message.role, None if message.name is None else mend(message.name), _shown(message.content + calls, mend)]


def _shown(text: str, mend: Mend) -> str:
    """Blanked first and cut then, so that no half of a secret is left at the cut.

    Of a very long text the middle is passed over unread: what is shown is MARGIN characters away from it.
    """
    half = LONGEST_TEXT // 2
    if len(text) <= LONGEST_TEXT + 2 * MARGIN:
        return _clipped(mend(text), LONGEST_TEXT)
    head, tail = mend(text[: half + MARGIN]), mend(text[-half - MARGIN :])
    return _joined(head[:half], tail[-half:], len(text) - 2 * half)


def _clipped(text: str, longest: int) -> str:
    if len(text) <= longest:
        return text
    half = longest // 2
    return _joined(text[:half], text[-half:], len(text) - 2 * half)


def _joined(head: str, tail: str, left_out: int) -> str:
    return f"{head} \u2026 [{left_out} characters left out] \u2026 {tail}"
