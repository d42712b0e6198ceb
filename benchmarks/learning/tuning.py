"""The search that every arm gets alike: which draws were tried, what they gave, and which one is used."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from measures import area, dialogues_to
from protocol import HERE, Arm, Draw, Job, Protocol, Study, Tuned
from runs import Result

from slea_llm.config import load_recipe

TUNING = HERE / "tuning"
KNOBS = ("learning_rate", "episodes", "minibatch", "entropy", "lam_turn")


def tuning_jobs(protocol: Protocol, arm: Arm) -> list[Job]:
    """Every draw under every tuning seed. Arms that use another's values have no search of their own."""
    if arm.tuned_as:
        raise SystemExit(f"arm {arm.name} uses the values of {arm.tuned_as}: tune that one")
    space = protocol.tuning
    return [
        replace(job, seed=seed, label=str(number))
        for number, draw in enumerate(space.values())
        for job in [
            protocol.job(
                arm, space.seeds[0], recipe=protocol.recipe, draw=draw, dialogues=space.of, until=space.dialogues
            )
        ]
        for seed in space.seeds
    ]


def study_jobs(study: Study, folder: Path = TUNING) -> list[Job]:
    """Seed by seed, so that an interrupted study has whole pairs."""
    first = [_first_job(study, arm, chosen(study.protocol, arm, folder) if study.tuned else None) for arm in study.arms]
    return [replace(job, seed=seed) for seed in study.seeds for job in first]


def _first_job(study: Study, arm: Arm, tuned: Tuned | None) -> Job:
    job = study.protocol.job(
        arm,
        study.seeds[0],
        recipe=study.recipe,
        draw=tuned.values if tuned else {},
        dialogues=study.dialogues,
        until=study.until,
    )
    return replace(job, tuned=tuned, label="" if job.complete else f"first{study.until}")


def chosen(protocol: Protocol, arm: Arm, folder: Path = TUNING) -> Tuned | None:
    """The draw with the largest mean area under its curves; None while no run of the search is there.

    Raises SystemExit when only a part of the search was made, or with other settings than the protocol has now.
    """
    searched = protocol.arm(arm.tuning)
    jobs = tuning_jobs(protocol, searched)
    results = read_results(folder / searched.name)
    if not results:
        return None
    check_digests(results, jobs, folder / searched.name)
    if missing := unplayed(jobs, results):
        raise SystemExit(
            f"the tuning of {searched.name} is not finished: {', '.join(missing)}; run `tune {searched.name}`"
        )
    areas = mean_areas(results.values())
    best = max(areas, key=lambda draw: areas[draw])
    files = hashlib.sha256()
    for name in sorted(results):
        files.update((folder / searched.name / f"{name}.json").read_bytes())
    return Tuned(arm=searched.name, draw=best, values=protocol.tuning.values()[best], files=files.hexdigest()[:16])


def unplayed(jobs: Sequence[Job], results: Mapping[str, Result]) -> list[str]:
    """Names of the jobs without a result."""
    return [job.name for job in jobs if job.name not in results]


def mean_areas(results: Iterable[Result]) -> dict[int, float]:
    """Draw -> mean area under the curves of its seeds, in the order of the draws."""
    areas: dict[int, list[float]] = {}
    for result in sorted(results, key=lambda one: int(one.label)):
        areas.setdefault(int(result.label), []).append(area(result.curve))
    return {draw: sum(found) / len(found) for draw, found in areas.items()}


def read_results(folder: Path) -> dict[str, Result]:
    """Name -> result of every finished run in a folder."""
    return {path.stem: Result.read(path) for path in sorted(folder.glob("*.json"))}


def kept(job: Job, results: Mapping[str, Result]) -> Result | None:
    """The result of a job: its own, or the beginning of the whole run where that was played."""
    whole = results.get(job.whole.name)
    return results.get(job.name) or (whole.first(job.until) if whole else None)


def check_digests(results: Mapping[str, Result], jobs: Sequence[Job], folder: Path) -> None:
    """Raises SystemExit when a kept result was made with other settings than its job has now."""
    wanted = {one.name: one for job in jobs for one in (job, job.whole)}
    stale = [name for name in results if name in wanted and results[name].digest != wanted[name].digest()]
    if stale:
        raise SystemExit(
            f"{folder}: {', '.join(stale)} made with other settings than protocol, recipe and tuning give now; move "
            "them away, or give another folder"
        )


def tuning_table(protocol: Protocol, folder: Path = TUNING) -> list[str]:
    """Markdown: every draw of every arm that was searched, the one in use marked."""
    lines = [row("arm", "draw", *KNOBS, "area", *(f"to {one:.0%}" for one in protocol.thresholds), "used")]
    lines.append(row(*["---"] * (5 + len(KNOBS) + len(protocol.thresholds) - 1)))
    for arm in protocol.arms.values():
        results = {} if arm.tuned_as else read_results(folder / arm.name)
        whole = bool(results) and not unplayed(tuning_jobs(protocol, arm), results)
        used = chosen(protocol, arm, folder) if whole else None
        for draw, mean in mean_areas(results.values()).items():
            runs = [one for one in results.values() if int(one.label) == draw]
            values = protocol.tuning.values()[draw] or recipe_values(protocol.recipe)
            cells = [
                ", ".join(
                    "-" if found is None else f"{found:,}"
                    for found in (dialogues_to(one.curve, threshold, window=protocol.window) for one in runs)
                )
                for threshold in protocol.thresholds
            ]
            mark = "" if whole else "search unfinished"
            mark = "yes" if used is not None and used.draw == draw else mark
            lines.append(
                row(arm.name, str(draw), *(f"{values[name]:g}" for name in KNOBS), f"{mean:.3f}", *cells, mark)
            )
    return lines


def recipe_values(recipe: str) -> Draw:
    """What a recipe itself has for the knobs."""
    plain = load_recipe(recipe)
    entropy = [one.options.get("weight", 0.0) for one in plain.losses if one.name == "entropy"]
    outcome = next(stream for stream in plain.streams.values() if "outcome" in stream.sources)
    return {
        "learning_rate": plain.trainer.learning_rate,
        "episodes": plain.rollout.episodes,
        "minibatch": plain.trainer.minibatch,
        "entropy": sum(entropy),
        "lam_turn": outcome.lam_turn,
    }


def row(*cells: str) -> str:
    """A line of a Markdown table."""
    return "| " + " | ".join(cells) + " |"
