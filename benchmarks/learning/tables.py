"""The tables of a study, as Markdown: what each arm reached, at what cost, against the baseline, seed by seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from measures import Bootstrap, Point, Spent, area, iqm, reached, spent
from protocol import Study
from runs import Result
from tuning import row

from slea_llm.measures import wilson

ARTICLES = (
    ("success", "92 %", "98 %", "-"),
    ("turns", "8.5", "6.2", "0.73"),
    ("environment steps to 80 %", "500,000", "200,000", "0.40"),
)
"""What the two articles say of training without and with step-level credit, and the ratio."""
FEWEST_SEEDS = 3
"""Seeds that two arms must have in common for a ratio or a difference: fewer give an interval that means nothing."""


@dataclass(frozen=True, slots=True)
class Tables:
    """The finished runs of a study, by arm."""

    study: Study
    by_arm: Mapping[str, Sequence[Result]]

    @classmethod
    def of(cls, study: Study, results: Sequence[Result]) -> Tables:
        return cls(study, {arm.name: [one for one in results if one.arm == arm.name] for arm in study.arms})

    @property
    def arms(self) -> list[str]:
        """Those with finished runs, in the order of the protocol."""
        return [arm.name for arm in self.study.arms if self.by_arm.get(arm.name)]

    @property
    def bootstrap(self) -> Bootstrap:
        return Bootstrap(resamples=self.study.protocol.resamples, confidence=self.study.protocol.confidence)

    def main(self) -> list[str]:
        thresholds = self.study.protocol.thresholds
        lines = _head(
            "arm", "seeds", "tuned", *(f"dialogues to {one:.0%}" for one in thresholds), "area", "sampled", "greedy",
            "turns of successes", "over the expert's", "asked again",
        )  # fmt: skip
        for arm in self.arms:
            runs = self.by_arm[arm]
            turns = [run.after["mean_turns_success"] for run in runs if run.after and run.after["mean_turns_success"]]
            ratios = [run.over_expert for run in runs if run.over_expert is not None]
            asked = [run.repeats for run in runs if run.repeats is not None]
            lines.append(
                row(
                    arm,
                    self._seeds(arm),
                    _tuned(runs),
                    *(self._cell(runs, threshold, lambda cost: cost.dialogues) for threshold in thresholds),
                    self.bootstrap.mean([area(run.curve) for run in runs]).text(3),
                    _rate(runs, "after"),
                    _rate(runs, "greedy"),
                    f"{iqm(turns):.2f}" if turns else "-",
                    f"{iqm(ratios):.3f}" if ratios else "-",
                    f"{iqm(asked):.3f}" if asked else "-",
                )
            )
        return lines

    def costs(self, threshold: float = 0.8) -> list[str]:
        lines = _head(
            "arm", f"environment turns to {threshold:.0%}", f"CPU s to {threshold:.0%}", f"wall s to {threshold:.0%}",
            "CPU s per 1,000 dialogues", "CPU s of a run, with starts and evaluations",
        )  # fmt: skip
        for arm in self.arms:
            runs = self.by_arm[arm]
            whole = [spent(run.curve, None) for run in runs]
            uninterrupted = [run.cpu_seconds for run in runs if run.after and not run.resumed]
            lines.append(
                row(
                    arm,
                    self._cell(runs, threshold, lambda cost: cost.turns),
                    self._cell(runs, threshold, lambda cost: cost.cpu),
                    self._cell(runs, threshold, lambda cost: cost.wall),
                    f"{iqm([1000 * cost.cpu / cost.dialogues for cost in whole]):.0f}",
                    f"{iqm(uninterrupted):.0f}" if uninterrupted else "-",
                )
            )
        return lines

    def comparisons(self) -> list[str]:
        """Every arm against the baseline."""
        base = self.study.baseline
        return [line for arm in self.arms if arm != base for line in self._compared(arm, base)]

    def best_over_others(self) -> list[str]:
        """The arm that the protocol named best before the runs, against all but the baseline."""
        best = self.study.best
        if best not in self.arms or best == self.study.baseline:
            return []
        others = [arm for arm in self.arms if arm not in (best, self.study.baseline)]
        return [line for other in others for line in self._compared(best, other)]

    def pairs(self) -> list[str]:
        """The further pairs of the protocol."""
        return [line for arm, base in self.study.pairs for line in self._compared(arm, base)]

    def _compared(self, arm: str, base: str) -> list[str]:
        """Ratios of dialogues to each threshold, and paired differences of area and of final success."""
        lines = [f"- {self.ratio_line(arm, threshold, base)}" for threshold in self.study.protocol.thresholds]
        measures: Sequence[tuple[str, Callable[[Result], float | None]]] = (
            ("area under the curve", lambda run: area(run.curve)),
            ("sampled success at the end", lambda run: run.after and run.after["success_rate"]),
        )
        for what, of in measures:
            ours, theirs = (
                {run.seed: found for run in self.by_arm[name] if (found := of(run)) is not None} for name in (arm, base)
            )
            if len(ours.keys() & theirs.keys()) >= FEWEST_SEEDS:
                lines.append(f"- {arm} less {base}, {what}: {self.bootstrap.difference((ours, theirs)).text(3)}")
        return lines

    def ratio_line(self, arm: str, threshold: float, base: str = "") -> str:
        """A ratio of dialogues with its interval, over the baseline or another arm; or why there is none."""
        base = base or self.study.baseline
        what = f"{arm} over {base}, dialogues to {threshold:.0%}"
        pair = self.pair(arm, threshold, base)
        if isinstance(pair, str):
            return f"{what}: no ratio, {pair}"
        shared = pair[0].keys() & pair[1].keys()
        missing = {
            name: sum(self._reached(run, threshold) is None for run in self.by_arm[name] if run.seed in shared)
            for name in (arm, base)
        }
        said = " and ".join(f"{count} of {name}" for name, count in missing.items() if count)
        note = f"; did not get there and count as the cap: {said}" if said else ""
        return f"{what}: {self.bootstrap.ratio(pair).text()}, {len(shared)} seeds{note}"

    def pair(self, arm: str, threshold: float, base: str = "") -> tuple[Mapping[int, float], Mapping[int, float]] | str:
        """Dialogues to a threshold by seed, of an arm and of what it is set against; or why they are not compared."""
        base = base or self.study.baseline
        runs, others = self.by_arm.get(arm, ()), self.by_arm.get(base, ())
        got = sum(self._reached(run, threshold) is not None for run in others)
        if not others or got < self.study.protocol.reached_share * len(others):
            name = "the baseline" if base == self.study.baseline else base
            return f"{name} got there in {got} of {len(others)} seeds"
        ours, theirs = (
            {run.seed: float(spent(run.curve, self._reached(run, threshold)).dialogues) for run in one}
            for one in (runs, others)
        )
        shared = len(ours.keys() & theirs.keys())
        if shared < FEWEST_SEEDS:
            return f"the arms share {shared} seeds, and {FEWEST_SEEDS} are asked for"
        return ours, theirs

    def seeds(self) -> list[str]:
        """Every run on its own; `>`: censored there."""
        thresholds = self.study.protocol.thresholds
        lines = _head("arm", "seed", *(f"to {one:.0%}" for one in thresholds), "before", "sampled", "greedy", "alarms")
        for arm in self.arms:
            for run in sorted(self.by_arm[arm], key=lambda one: one.seed):
                cells = []
                for threshold in thresholds:
                    last = self._reached(run, threshold)
                    cells.append(f"{'> ' if last is None else ''}{spent(run.curve, last).dialogues:,}")
                rates = [f"{one['success_rate']:.3f}" if one else "-" for one in (run.before, run.after)]
                greedy = f"{run.greedy['success_rate']:.3f}" if run.greedy else "-"
                names = sorted({name for _, several in run.alarms for name in several})
                lines.append(row(arm, str(run.seed), *cells, *rates, greedy, ", ".join(names) or "none"))
        return lines

    def alarms(self) -> list[str]:
        """When success fell, and what the health alarms had said by then.

        Success has fallen where the last `window` dialogues succeeded less often than at their best by `fall`.
        """
        lines = _head(
            "arm", "seed", "best success", "at", "at the end", "fell at", "reward_hacking at", "first alarm", "at"
        )
        for arm in self.arms:
            for run in sorted(self.by_arm[arm], key=lambda one: one.seed):
                rates = windowed(run.curve, self.study.protocol.window)
                best = max(range(len(rates)), key=lambda at: rates[at])
                fell = fallen(rates, self.study.protocol.fall)
                hacking = next((at for at, names in run.alarms if "reward_hacking" in names), None)
                first = run.alarms[0] if run.alarms else None
                lines.append(
                    row(
                        arm,
                        str(run.seed),
                        f"{rates[best]:.3f}",
                        f"{spent(run.curve, best).dialogues:,}",
                        f"{rates[-1]:.3f}",
                        "never" if fell is None else f"{spent(run.curve, fell).dialogues:,}",
                        "never" if hacking is None else f"{spent(run.curve, hacking - 1).dialogues:,}",
                        ", ".join(first[1]) if first else "none",
                        f"{spent(run.curve, first[0] - 1).dialogues:,}" if first else "-",
                    )
                )
        return lines

    def articles(self) -> list[str]:
        """The articles' table beside ours: the baseline, and the arm that the protocol named best before the runs."""
        base, best = self.study.baseline, self.study.best
        if not (best and self.by_arm.get(base) and self.by_arm.get(best)) or self.study.until < self.study.dialogues:
            return []
        sides = [self.by_arm[base], self.by_arm[best]]
        turns = [iqm([run.after["mean_turns_success"] or 0.0 for run in runs if run.after]) for runs in sides]
        steps = [self._cell(runs, 0.8, lambda cost: cost.turns) for runs in sides]
        own = (
            (_rate(sides[0], "after"), _rate(sides[1], "after"), "-"),
            (f"{turns[0]:.2f}", f"{turns[1]:.2f}", f"{turns[1] / turns[0]:.2f}" if turns[0] else "-"),
            (steps[0], steps[1], self.ratio_line(best, 0.8).partition(": ")[2]),
        )
        lines = _head("", "articles, without", "articles, with", "ratio", f"ours, {base}", f"ours, {best}", "ratio")
        lines += [row(*said, *found) for said, found in zip(ARTICLES, own, strict=True)]
        return lines

    def provenance(self) -> list[str]:
        """Commits, versions and settings that the runs were made with: one of each, or a warning."""
        runs = [run for arm in self.arms for run in self.by_arm[arm]]
        commits = sorted({run.commit for run in runs})
        versions = sorted({", ".join(f"{name} {one}" for name, one in run.versions.items()) for run in runs})
        resumed = sum(run.resumed > 0 for run in runs)
        whole = self.study.dialogues
        unfinished = sum(len(self.by_arm.get(arm.name, ())) < len(self.study.seeds) for arm in self.study.arms)
        part = f", the first of runs of {whole:,}" if self.study.until < whole else ""
        lines = [
            f"{len(runs)} runs, {resumed} of them resumed; window {self.study.protocol.window} dialogues, "
            f"cap {self.study.until:,}{part}; intervals {self.study.protocol.confidence:.0%}, "
            f"{self.study.protocol.resamples:,} resamples."
        ]
        if unfinished:
            lines.append(f"**Not finished**: {unfinished} arms lack runs of some of the {len(self.study.seeds)} seeds.")
        return [*lines, f"Commits: {', '.join(commits)}.", *(f"Versions: {one}." for one in versions)]

    def _seeds(self, arm: str) -> str:
        """How many seeds are finished, and of how many where not all are."""
        got, wanted = len(self.by_arm[arm]), len(self.study.seeds)
        return str(got) if got == wanted else f"{got} of {wanted}"

    def _cell(self, runs: Sequence[Result], threshold: float, of: Callable[[Spent], float]) -> str:
        """The interquartile mean of a cost, how many got there, `>=` where some are censored at the cap."""
        places = [self._reached(run, threshold) for run in runs]
        got = sum(place is not None for place in places)
        cost = iqm([of(spent(run.curve, place)) for run, place in zip(runs, places, strict=True)])
        return f"{'' if got == len(runs) else '>= '}{cost:,.0f} ({got}/{len(runs)})"

    def _reached(self, run: Result, threshold: float) -> int | None:
        return reached(run.curve, threshold, window=self.study.protocol.window)


def parts(study: Study, results: Sequence[Result]) -> dict[str, list[str]]:
    """All tables of a study by their heading, the first under its name; empty where there is nothing to say."""
    found = Tables.of(study, results)
    return {
        study.name: [*found.provenance(), "", *found.main()],
        f"Against {study.baseline}": found.comparisons(),
        f"{study.best} against the others": found.best_over_others(),
        "Pair by pair": found.pairs(),
        "Beside the articles": found.articles(),
        "What it costs": found.costs(),
        "Alarms": found.alarms(),
        "Every seed": found.seeds(),
    }


def tables(study: Study, results: Sequence[Result]) -> list[str]:
    """All tables of a study, each under a heading."""
    lines: list[str] = []
    for heading, part in parts(study, results).items():
        if part:
            lines += [f"### {heading}", "", *part, ""]
    return lines


def pooled(domains: Sequence[Tables], arm: str) -> list[str]:
    """Ratios over several domains at once: each weighs alike, and its seeds are resampled within it."""
    lines = []
    for threshold in domains[0].study.protocol.thresholds:
        pairs = [one.pair(arm, threshold) for one in domains]
        what = f"- {arm} over the baselines of {', '.join(one.study.name for one in domains)}, to {threshold:.0%}"
        whole = [pair for pair in pairs if not isinstance(pair, str)]
        if len(whole) == len(pairs):
            lines.append(f"{what}: {domains[0].bootstrap.ratio(*whole).text()}")
        else:
            why = [
                f"{one.study.name}: {pair}" for one, pair in zip(domains, pairs, strict=True) if isinstance(pair, str)
            ]
            lines.append(f"{what}: no ratio ({'; '.join(why)})")
    return lines


def windowed(curve: Sequence[Point], window: int) -> list[float]:
    """Success of the last `window` dialogues after every iteration; of all of them while there are fewer."""
    rates = []
    for last in range(len(curve)):
        played = successes = 0
        for point in reversed(curve[: last + 1]):
            played, successes = played + point.played, successes + point.successes
            if played >= window:
                break
        rates.append(successes / max(played, 1))
    return rates


def fallen(rates: Sequence[float], fall: float) -> int | None:
    """Place at which a rate is below its best so far by `fall` or more; None: never."""
    best = 0.0
    for place, rate in enumerate(rates):
        best = max(best, rate)
        if best - rate >= fall:
            return place
    return None


def _head(*names: str) -> list[str]:
    return [row(*names), row(*["---"] * len(names))]


def _tuned(runs: Sequence[Result]) -> str:
    """Which draw of whose search was used."""
    found = {f"{run.tuned.arm} {run.tuned.draw}" if run.tuned else "no" for run in runs}
    return ", ".join(sorted(found))


def _rate(runs: Sequence[Result], panel: str) -> str:
    """Success over the panels of all seeds, with its Wilson interval."""
    reports = [getattr(run, panel) for run in runs if getattr(run, panel)]
    if not reports:
        return "-"
    won, played = (sum(one[name] for one in reports) for name in ("successes", "n"))
    low, high = wilson(won, played)
    return f"{won / played:.1%} ({low:.1%} to {high:.1%})"
