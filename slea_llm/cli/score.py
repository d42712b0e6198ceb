"""Score every step of logged dialogues: a number and a reason each, by rules, or by the evaluators that you name.

`slea score mylogs.jsonl` is enough for a first look: it cuts each reply into steps, scores them by general rules,
prints what stands out and writes everything into the folder `mylogs.scores`. Every run adds to that folder and changes
nothing in it. `slea report mylogs.scores` then makes one HTML file of it. The exit code is 1 when not one step could be
scored. docs/scoring.md is a guide.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slea_llm.cli.output import say
from slea_llm.errors import ConfigError, SleaError, StorageError, UnsupportedError, nearest

if TYPE_CHECKING:
    from slea_llm.annotations import Annotations
    from slea_llm.config import ScoringRecipe
    from slea_llm.crediting import Crediting
    from slea_llm.logs.reading import LogReader
    from slea_llm.score_runs import RunCard, ScoreRun
    from slea_llm.scoring import Scorer
    from slea_llm.types import ScoredTrajectory, Trajectory

CHUNK = 64
"""Dialogues between two writes to the disk."""
MOST_ENVIRONMENTS = 100
"""Environments whose names are kept."""
MOST_CREDITED = 5_000
"""Dialogues up to which advantages are worked out unasked: they take the whole log into memory."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("log", type=Path, nargs="+", help="logs of dialogues, folders of logs, or an earlier OUTPUT")
    parser.add_argument(
        "--output", type=Path, help="folder of results (default: the log's name with .scores, beside it)"
    )
    parser.add_argument(
        "--evaluator", action="append", help="evaluator by name, repeatable (default: rules; `slea list`)"
    )
    parser.add_argument("--parser", help="how replies are cut into steps (default: auto; `slea list parser`)")
    parser.add_argument("--recipe", type=Path, help="YAML with parser, evaluators, augmenters, streams, credit")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY.SUB=VALUE", help="change a setting of these, repeatable"
    )
    add_reading(parser)
    parser.add_argument("--labels", type=Path, help="labels and overrides made by hand (JSON lines)")
    parser.add_argument(
        "--credit",
        action=argparse.BooleanOptionalAction,
        help=f"advantages of every step as in training (default: for logs of up to {MOST_CREDITED} dialogues)",
    )
    parser.add_argument("--resume", action="store_true", help="go on with the last run, which was interrupted")
    parser.add_argument(
        "--compare", nargs=2, metavar=("A", "B"), help="compare two evaluators by name, or two runs of OUTPUT by number"
    )


def run(arguments: argparse.Namespace) -> int:
    folder = arguments.output or default_output(arguments.log[0])
    if arguments.compare and _compare_runs(folder, *arguments.compare):
        return 0
    from slea_llm import planning, score_runs
    from slea_llm.annotations import Annotations
    from slea_llm.cli import compose

    recipe = _recipe(arguments)
    _refuse_live_parts(recipe)
    if not arguments.recipe:
        _note_knowledge(recipe)
    scorer = compose.scorer(recipe)
    annotations = Annotations.read(arguments.labels) if arguments.labels else None
    for line in (*planning.cut_otherwise(recipe), *(gate.line for gate in scorer.gates().values())):
        say(line)
    crediting = _crediting(recipe, asked=arguments.credit)
    reader = log_reader(arguments.log, format=arguments.format, strict=arguments.strict)
    card = _card(arguments, recipe, scorer, annotations)
    one = _resumed(folder, card) if arguments.resume else _begun(folder, card)
    with one.held():
        environments = _score(one, scorer, annotations, reader, resumed=arguments.resume)
        one = _finish(one, crediting, scorer, annotations, unasked=arguments.credit is None)
    if arguments.compare:
        for line in _compared(one, one, *arguments.compare):
            say(line)
    asked = (f"{name}: {usage.line()}" for name, usage in scorer.usages().items())
    for line in (*_misplaced(scorer.evaluators, environments), *asked):
        say(line)
    say(f"written to {folder} ({one.name}); `slea report {folder}` makes one HTML file of it")
    return int(score_runs.scored_nothing(one.card.counts))


def default_output(log: Path) -> Path:
    """Where results go unless told: beside the log, and for earlier results into them.

    Raises ConfigError for the root of a disk.
    """
    from slea_llm.logs.sources import PACKED, SUFFIXES
    from slea_llm.score_runs import runs

    if runs(log):
        return log
    place = log if log.name not in ("", "..") else log.resolve()
    name = place.name
    while not place.is_dir() and (suffix := Path(name).suffix) and suffix.lower() in {".scores", *PACKED, *SUFFIXES}:
        name = name.removesuffix(suffix)
    if not name:
        raise ConfigError(f"{log} has no name for its results to take; give --output FOLDER")
    return place.with_name(f"{name}.scores")


def add_reading(parser: argparse.ArgumentParser) -> None:
    """`--format NAME` and `--strict`, for commands that read logs."""
    parser.add_argument(
        "--format", help="format of the logs (see `slea list`); without it each record's is found by its content"
    )
    parser.add_argument("--strict", action="store_true", help="end at the first record that cannot be read")


def read_logs(path: Path) -> Iterator[Trajectory]:
    """The dialogues of a log or a folder; what was not read is said on standard error."""
    reader = log_reader([path])
    yield from reader
    if reader.fault_count:
        for line in reader.lines():
            sys.stderr.write(line + "\n")


def log_reader(paths: Sequence[Path], *, format: str | None = None, strict: bool = False) -> LogReader:
    """A reader of logs and folders of logs; of results of an earlier scoring the newest run is read.

    Raises ConfigError for a path that is not there.
    """
    from slea_llm.logs.reading import LogReader
    from slea_llm.score_runs import newest_log

    for path in paths:
        if path.is_symlink() and not path.exists():
            raise ConfigError(f"{path} is a link to something that is not there")
        if not path.exists():
            near = nearest(path.name, [one.name for one in path.parent.iterdir()]) if path.parent.is_dir() else ""
            raise ConfigError(f"{path} is not there{near}")
    return LogReader(*map(newest_log, paths), format=format, strict=strict)


def _recipe(arguments: argparse.Namespace) -> ScoringRecipe:
    """The recipe, with what the command line names in its place."""
    from slea_llm.config import ComponentSpec, load_scoring_recipe

    recipe = load_scoring_recipe(arguments.recipe, arguments.set if arguments.recipe else ())
    changes: dict[str, Any] = {}
    wanted = [*(arguments.evaluator or ()), *_evaluators_named(arguments.compare or ())]
    if wanted:
        known = {spec.name: spec for spec in recipe.evaluators} if arguments.recipe else {}
        changes["evaluators"] = tuple(known.get(name, ComponentSpec(name=name)) for name in dict.fromkeys(wanted))
    if arguments.parser:
        changes["parser"] = ComponentSpec(name=arguments.parser)
    recipe = recipe.model_copy(update=changes)
    if arguments.set and not arguments.recipe:
        recipe = _changed(recipe, arguments.set)
    if not recipe.evaluators:
        raise ConfigError(f"{arguments.recipe or '--set'} leaves no evaluator; name one, or give --evaluator rules")
    return recipe if recipe.streams else recipe.model_copy(update={"streams": _streams(recipe)})


def _changed(recipe: ScoringRecipe, changes: Sequence[str]) -> ScoringRecipe:
    """`--set` on what --evaluator and --parser made."""
    from slea_llm.config import changed_scoring_recipe

    return changed_scoring_recipe(recipe, changes)


def _streams(recipe: ScoringRecipe) -> dict[str, Any]:
    """The outcome, and the scores, which are hints, at a weight of 0.3; without a critic nothing is discounted."""
    from slea_llm import registry
    from slea_llm.settings import StreamSettings

    paying = [spec.name for spec in recipe.augmenters if hasattr(registry.load("augmenter", spec.name), "augment")]
    scores = (*(spec.name for spec in recipe.evaluators), *paying)
    return {
        "outcome": StreamSettings(sources=("outcome",), gamma_turn=1.0),
        "scores": StreamSettings(sources=scores, gamma_turn=1.0, lam_turn=0.5, lam_step=0.5, weight=0.3),
    }


def _evaluators_named(names: Sequence[str]) -> list[str]:
    """Those of `--compare` that are no numbers of runs. Raises ConfigError for one that is neither."""
    from slea_llm import registry

    found = [name for name in names if not name.removeprefix("run-").isdigit()]
    known = registry.names("evaluator")
    for name in found:
        if name not in known:
            raise ConfigError(
                f"--compare {name!r} is neither a run of the output nor an evaluator; evaluators: "
                f"{', '.join(sorted(known))}{nearest(name, known)}"
            )
    return found


def _note_knowledge(recipe: ScoringRecipe) -> None:
    """Say before the work begins whose knowledge is used where nobody chose one."""
    if any(spec.name == "knowledge_base" and "file" not in spec.options for spec in recipe.evaluators):
        say(
            "note: knowledge_base knows taking orders alone unless told otherwise; "
            "--set evaluators.knowledge_base.file=FILE names other knowledge (docs/evaluators.md says how to write it)"
        )


def _refuse_live_parts(recipe: ScoringRecipe) -> None:
    """Raise UnsupportedError, saying why and what to take instead, for an evaluator that needs more than a log."""
    from slea_llm.config import component_config

    why = {
        "continuations": "it plays dialogues on in a live environment with the policy that is trained, and a log has "
        "neither; use it in training, or `counterfactual_prediction`, which learns from logs",
    }
    for spec in recipe.evaluators:
        cls, _ = component_config("evaluator", spec)
        for need in sorted(getattr(cls, "needs", frozenset()) & why.keys()):
            raise UnsupportedError(f"evaluator {spec.name!r} cannot score a log: {why[need]}")


def _card(
    arguments: argparse.Namespace, recipe: ScoringRecipe, scorer: Scorer, annotations: Annotations | None
) -> RunCard:
    from slea_llm import score_runs
    from slea_llm.logs.sources import find_files

    paths = [score_runs.newest_log(log) for log in arguments.log]
    return score_runs.RunCard(
        sources=tuple(score_runs.fingerprint(file) for path in paths for file in find_files(path)[0]),
        parser=recipe.parser.name,
        evaluators={one.name: one.version for one in scorer.evaluators},
        settings={**recipe.model_dump(mode="json"), "format": arguments.format},
        annotations=None if annotations is None else {"name": annotations.name, "sha256": annotations.digest},
        started=_now(),
    )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _begun(folder: Path, card: RunCard) -> ScoreRun:
    """A new run; an earlier one that was not finished is named."""
    from slea_llm import score_runs

    if (broken := score_runs.unfinished(folder)) is not None:
        try:
            with broken.held():
                say(f"note: {folder}/{broken.name} was interrupted; this is a new run, --resume goes on with it")
        except StorageError as error:
            say(f"note: {error}; this is a new run beside it")
    read = {source["name"] for source in card.sources}
    others = {source["name"] for run in score_runs.runs(folder) for source in run.card.sources} - read
    if others and not any(run.card.sources == card.sources for run in score_runs.runs(folder)):
        say(f"note: earlier runs of {folder} read other logs, such as {min(others)}; --output gives this one a folder")
    return score_runs.start(folder, card)


def _resumed(folder: Path, card: RunCard) -> ScoreRun:
    """The interrupted run, if it did the same work. Raises ConfigError when there is none, or it was another's."""
    from slea_llm import score_runs

    one = score_runs.unfinished(folder)
    if one is None:
        raise ConfigError(f"--resume: {folder} holds no interrupted run; leave --resume out")
    differing = one.card.same_work(card) if one.card.parser else []
    if differing:
        raise ConfigError(
            f"--resume: {one.name} was begun otherwise and would mix two kinds of scores; leave --resume out for a run "
            "of its own, or put back:\n  " + "\n  ".join(differing)
        )
    return one if one.card.parser else one.save(card)


def _score(
    one: ScoreRun, scorer: Scorer, annotations: Annotations | None, reader: LogReader, *, resumed: bool
) -> set[str]:
    """Score what the run's log does not hold yet, and append it as it comes; the environments of all dialogues.

    A new run that could read nothing is taken back. Raises ConfigError then, and what the reader raises.
    """
    from slea_llm import score_runs

    try:
        environments = _append(one, scorer, annotations, reader)
        for line in reader.lines():
            say(line)
        if not reader.trajectories:
            raise ConfigError(
                "no dialogue could be read, so nothing was scored; `slea list log_format` has the formats that are "
                "known, docs/logs.md says what each looks like, --format NAME forces one"
            )
    except SleaError:
        if not (resumed or reader.trajectories):
            score_runs.discard(one)
        raise
    return environments


def _append(one: ScoreRun, scorer: Scorer, annotations: Annotations | None, reader: LogReader) -> set[str]:
    from slea_llm.interfaces import Remembering
    from slea_llm.storage import ScoredLog

    trajectories = iter(reader)
    with ScoredLog(one.scores) as log:
        done = _skip(one, trajectories) if log.position else []
        environments = {trajectory.environment for trajectory in done}
        if done:
            say(f"{one.name}: {len(done)} dialogues are scored already, going on after them")
            if any(isinstance(evaluator, Remembering) for evaluator in scorer.evaluators):
                # What they say next depends on what they saw: they see it again.
                for _ in scorer.score_many(done):
                    pass
        for part in _chunks(scorer.score_many(trajectories, chunk=CHUNK)):
            log.append(*(annotations.overrule(scored) if annotations else scored for scored in part))
            if len(environments) < MOST_ENVIRONMENTS:
                environments.update(scored.trajectory.environment for scored in part)
    return environments


def _misplaced(evaluators: Iterable[Any], environments: set[str]) -> Iterator[str]:
    """What evaluators that know one domain, alone or in a blend, say of dialogues of others."""
    for one in evaluators:
        if hasattr(one, "misplaced") and (line := one.misplaced(one.config, environments)):
            yield f"note: {line}"
        yield from _misplaced(getattr(one, "evaluators", ()), environments)


def _skip(one: ScoreRun, trajectories: Iterator[Trajectory]) -> list[Trajectory]:
    """The dialogues that the run holds already, taken off the front of the log. Raises ConfigError when they differ."""
    done = []
    for scored in one.read():
        trajectory = next(trajectories, None)
        if trajectory is None or trajectory.id != scored.trajectory.id:
            raise ConfigError(
                f"--resume: {one.name} goes on after {scored.trajectory.id!r}, where the log now has "
                f"{None if trajectory is None else trajectory.id!r}; leave --resume out"
            )
        done.append(trajectory)
    return done


def _chunks(scored: Iterator[ScoredTrajectory]) -> Iterator[list[ScoredTrajectory]]:
    while part := list(itertools.islice(scored, CHUNK)):
        yield part


def _crediting(recipe: ScoringRecipe, *, asked: bool | None) -> Crediting | None:
    """What works out advantages, made before anything is scored, so that its faults are told at once; None: not wanted.

    Where nobody asked, a credit that needs more than a log is left out with its reason; where somebody did, it raises.
    """
    from slea_llm.cli import compose
    from slea_llm.offline_credit import refuse_live_parts

    if asked is False:
        return None
    try:
        made = compose.crediting(recipe)
        refuse_live_parts(made)
    except UnsupportedError as error:
        if asked:
            raise
        say(f"advantages left out: {error}")
        return None
    return made


def _finish(
    one: ScoreRun,
    crediting: Crediting | None,
    scorer: Scorer,
    annotations: Annotations | None,
    *,
    unasked: bool,
) -> ScoreRun:
    """Read the run back: credit, summary, and its card closed. What is on the disk is what is counted."""
    from slea_llm.cli.score_summary import ScoreSummary

    summary = ScoreSummary([evaluator.name for evaluator in scorer.evaluators], annotations)
    count = 0
    for scored in one.read():
        summary.add(scored)
        count += 1
    if crediting is not None and unasked and count > MOST_CREDITED:
        say(f"advantages left out for more than {MOST_CREDITED} dialogues; --credit works them out in memory")
    elif crediting is not None:
        _credit(one, crediting)
    # The card is closed before anything is printed: whoever reads only the head of the summary has the whole run.
    one = one.save(dataclasses.replace(one.card, finished=_now(), counts=summary.counts()))
    for line in summary.lines():
        say(line)
    return one


def _credit(one: ScoreRun, crediting: Crediting) -> None:
    from slea_llm.offline_credit import step_credit
    from slea_llm.score_runs import CREDIT

    found = step_credit(crediting, list(one.read()))
    CREDIT.write(one.credit, found)
    reasons = [credit.why_not for credit in found if credit.why_not is not None]
    if reasons:
        say(f"{len(reasons)} of {len(found)} dialogues carry no advantages, the first because: {reasons[0]}")


def _compare_runs(folder: Path, first: str, second: str) -> bool:
    """Compare two finished runs of the folder; False when these are no runs."""
    from slea_llm import score_runs

    found = [score_runs.find(folder, name) for name in (first, second)]
    if None in found and any(name.removeprefix("run-").isdigit() for name in (first, second)):
        known = ", ".join(run.name for run in score_runs.runs(folder)) or "none"
        raise ConfigError(f"--compare {first} {second}: {folder} holds the runs {known}")
    one, other = found
    if one is None or other is None:
        return False
    for line in _compared(one, other):
        say(line)
    return True


def _compared(one: ScoreRun, other: ScoreRun, first: str | None = None, second: str | None = None) -> Iterable[str]:
    """Two evaluators of one run, or the evaluators of two runs: those of one name, else the first of each."""
    from slea_llm.comparison import compare

    if first is not None and second is not None:
        yield from compare(one.read(), first, other.read(), second).lines(first, second)
        return
    shared = [name for name in one.card.evaluators if name in other.card.evaluators]
    pairs = [(name, name) for name in shared] or [(next(iter(one.card.evaluators)), next(iter(other.card.evaluators)))]
    for mine, theirs in pairs:
        found = compare(one.read(), mine, other.read(), theirs)
        yield from found.lines(f"{one.name} {mine}", f"{other.name} {theirs}")
