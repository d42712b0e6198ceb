"""Shape the reward by a value function of its own, learnt on the dialogues of the run and used as a potential."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from slea_llm.augmenters.learnt import Arrays, Floats, Held, LearntAugmenter, returns
from slea_llm.augmenters.places import Place, places, row_size, rows
from slea_llm.augmenters.potentials import check_potential
from slea_llm.augmenters.turns import steps_by_turn
from slea_llm.augmenters.value_function import initial, predict, td_targets
from slea_llm.errors import ConfigError, CreditError, StorageError
from slea_llm.settings import StreamSettings
from slea_llm.types import ScoredTrajectory

Form = Literal["potential", "unmasked", "positive", "centred"]


class ValueShaping(LearntAugmenter):
    """Pays eta (gamma V(s') - V(s)) for every turn, or for every step, with V the return expected at a place.

    - `potential`: V is 0 after the end of a dialogue, so that the discounted sum is -eta V(s_0) whatever the agent does
      and the best policy stays the best (Ng, Harada and Russell 1999); a dialogue that was cut keeps gamma V, since its
      value is bootstrapped. Every credit asks the present V anew, so that no sum mixes two of them (Devlin and Kudenko
      2012 for potentials that move). `gamma` must be the turn discount of the stream that this part feeds, and the
      critic of that stream learns the shaped rewards: a V that is shaped with and read as critic would count twice.
    - `unmasked`: V is not 0 after the end. The sum then holds gamma^T V(s_T), and an agent earns by ending well-valued.
    - `positive`: max(0, V(s') - V(s)). Going back and forth earns without end.
    - `centred`: `potential`, less the dialogue's mean shaped reward a turn: no longer a potential.

    V learns from all dialogues of a window, ends of every kind; it pays nothing until its gate opens.
    """

    name: ClassVar[str] = "value_shaping"
    bound: ClassVar[tuple[str, ...]] = ("level", "gamma", "hidden", "learn_from")

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        form: Form = "potential"
        level: Literal["turn", "step"] = "turn"
        """`turn`: V before turns, paid on the last step of each. `step`: also after the steps of a turn, each paid."""
        eta: float = 1.0
        """Factor on the shaping, 0 or more."""
        gamma: float = 0.99
        """Discount between turns; of `potential` it must equal `gamma_turn` of the stream that this part feeds."""
        clip: float = 0.0
        """Bound on the absolute shaped reward of a turn or step, the environment's included. 0: none. Above 0 the sum
        depends on the way: the best policy may change."""
        encoder: str = "hashing"
        """Sentence encoder of what was said and heard; `use-multilingual` reads meaning, at some 10 ms a new text."""
        hidden: int = 64
        """Width of the inner layer. 0: one layer alone."""
        lam: float = 1.0
        """Lambda of V's targets, in [0, 1]. 1: Monte Carlo returns; 0: TD(0)."""
        tau: float = 0.005
        """Polyak rate at which the copy in use follows, a step of its learning; in [0, 1]. 0: a hard copy at the end of
        every refresh. The first fit is always a hard copy."""
        refresh_every: int = 16
        """Finished dialogues after which V learns again. 0: never."""
        window: int = 256
        """Newest dialogues that it learns from, 1 or more."""
        learn_from: Literal["all", "successes"] = "all"
        """`successes` makes a V that knows no failure: it says of every state what a success from there is worth."""
        model: str = ""
        """Folder of a copy that an earlier run fitted, `<run>/augmenters/value_shaping/iteration-N`, to start from."""

        def __post_init__(self) -> None:
            allowed: Mapping[str, tuple[str, ...]] = {
                "form": ("potential", "unmasked", "positive", "centred"),
                "level": ("turn", "step"),
                "learn_from": ("all", "successes"),
            }
            for key, known in allowed.items():
                if getattr(self, key) not in known:
                    raise ConfigError(f"{key} {getattr(self, key)!r} is not one of {', '.join(known)}")
            for key in ("gamma", "lam", "tau"):
                if not 0.0 <= getattr(self, key) <= 1.0:
                    raise ConfigError(f"{key} {getattr(self, key)} is not in [0, 1]")
            for key in ("eta", "clip", "hidden", "refresh_every"):
                if not (math.isfinite(getattr(self, key)) and getattr(self, key) >= 0):
                    raise ConfigError(f"{key} {getattr(self, key)} is not a finite number of 0 or more")
            if self.window < 1:
                raise ConfigError(f"window {self.window} must be 1 or more")

    def __init__(self, config: Config) -> None:
        self.config: ValueShaping.Config = config
        super().__init__(encoder=config.encoder, refresh_every=config.refresh_every, window=config.window)
        if config.model:
            self.load(Path(config.model))

    @classmethod
    def fits(cls, config: Config, name: str, stream: StreamSettings) -> list[str]:
        """What is odd about feeding this stream. Raises UnsupportedError when a potential would not be one in it."""
        if config.form == "potential":
            check_potential(cls.name, config.gamma, name, stream)
        notes = {
            "unmasked": "an agent earns by ending where V is high",
            "positive": "going back and forth earns without end",
            "centred": "it is no longer a potential, so that the best policy may change",
        }
        found = []
        if config.form in notes:
            found.append(f"augmenter {cls.name}, form {config.form}: {notes[config.form]}; set form to potential")
        if config.clip:
            found.append(f"augmenter {cls.name} clips what it pays: that is no potential any more; set clip to 0")
        return found

    def augment(self, scored: ScoredTrajectory, progress: float) -> Mapping[tuple[int, int], float]:
        """`(turn, step) -> reward`; nothing before there is a copy, for a failed dialogue and for one without turns."""
        del progress
        if self._arrays is None or scored.trajectory.failed or not scored.trajectory.turns:
            return {}
        found = self._places(scored)
        return self.shaped(scored, self._values(self._arrays, found))

    def shaped(self, scored: ScoredTrajectory, values: Sequence[float]) -> dict[tuple[int, int], float]:
        """What is paid when V says `values` of the places of the dialogue, the one after its end included."""
        trajectory, config = scored.trajectory, self.config
        moves = self._moves(scored)
        potentials = [config.eta * value for value in values]
        if config.form != "unmasked" and not trajectory.truncated:
            potentials[-1] = 0.0
        steps = pairwise(potentials)
        if config.form == "positive":
            paid = [max(0.0, after - before) for before, after in steps]
        else:
            paid = [move.gamma * after - before for move, (before, after) in zip(moves, steps, strict=True)]
        rewards = [move.reward for move in moves]
        if config.form == "centred":
            mean = math.fsum([*paid, *rewards]) / len(paid)
            paid = [one - mean for one in paid]
        if config.clip:
            low, high = -config.clip, config.clip
            paid = [min(max(one + raw, low), high) - raw for one, raw in zip(paid, rewards, strict=True)]
        return {move.key: one for move, one in zip(moves, paid, strict=True)}

    def _places(self, scored: ScoredTrajectory) -> list[Place]:
        return places(scored, steps=self.config.level == "step")

    def _values(self, arrays: Arrays, found: Sequence[Place]) -> list[float]:
        """V of places, in units of reward, within the range of the returns that it learnt from."""
        centre, scale = (float(one) for one in arrays["scale"])
        low, high = (float(one) for one in arrays["range"])
        raw = predict(_part(arrays, "target"), rows(found, self.encoder))
        return [float(one) for one in np.clip(centre + scale * raw, low, high)]

    def _learn(
        self, data: Sequence[ScoredTrajectory], *, present: Arrays | None, fresh: Sequence[ScoredTrajectory], seed: int
    ) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        from slea_llm.augmenters.value_learning import learn

        del fresh
        if self.config.learn_from == "successes":
            data = [one for one in data if one.trajectory.success]
            if not data:
                raise ConfigError(f"{self.name}: none of the dialogues succeeded; set learn_from to 'all'")
        found = [self._places(one) for one in data]
        table = rows([place for one in found for place in one], self.encoder)
        every = np.concatenate([returns(one, gamma=self.config.gamma) for one in data])
        size, first = row_size(self.encoder), present is None
        if present is None:
            start = initial(size, self.config.hidden, seed=seed)
            # Set once: the weights of every later copy are in these units.
            scale = np.array([every.mean(), every.std() or 1.0])
            online, target = start, start
        else:
            online, target, scale = _part(present, "online"), _part(present, "target"), present["scale"]
        learnt, followed = learn(
            online, target, table, self._targets(data, scale), tau=0.0 if first else self.config.tau, seed=seed
        )
        arrays = {f"online.{name}": one for name, one in learnt.items()}
        arrays |= {f"target.{name}": one for name, one in followed.items()}
        arrays |= {"scale": scale, "range": np.array([every.min(), every.max()])}
        settings = {name: getattr(self.config, name) for name in (*self.bound, "lam", "tau")}
        return arrays, {"settings": settings, "places": len(table)}

    def _predict(self, data: Sequence[ScoredTrajectory]) -> Held:
        """V before every turn of the dialogues that ended: of one that was cut nobody knows the return."""
        if self._arrays is None:
            raise CreditError(f"{self.name}: nothing was fitted yet")
        held = Held.empty()
        for number, scored in enumerate(one for one in data if not one.trajectory.truncated):
            starts = [place for place in self._places(scored)[:-1] if place.step == 0]
            count = len(starts)
            one = Held(
                predicted=np.array(self._values(self._arrays, starts)),
                wanted=np.array(returns(scored, gamma=self.config.gamma)),
                success=np.full(count, float(scored.trajectory.success)),
                place=np.arange(count, dtype=np.float64),
                dialogue=np.zeros(count),
            )
            held = held.extended(one, most=number + 1)
        return held

    def _open(self, arrays: Arrays) -> None:
        weights, size = _part(arrays, "target"), row_size(self.encoder)
        last = weights.get("in.weight", weights.get("out.weight"))
        if last is None or last.shape[-1] != size or arrays["scale"].shape != (2,) or arrays["range"].shape != (2,):
            raise StorageError(
                f"the weights of {self.name} do not fit rows of {size} numbers; let the run fit it again"
            )

    def _targets(self, data: Sequence[ScoredTrajectory], scale: Floats) -> Callable[[Floats], Floats]:
        """The function that gives the targets of all places from the target network's values of them, in its units."""
        moves = [self._moves(one) for one in data]
        bounds = np.cumsum([0, *(len(one) + 1 for one in moves)])
        centre, unit = (float(one) for one in scale)

        def targets(values: Floats) -> Floats:
            known = centre + unit * values
            wanted = np.full(len(values), np.nan)
            for one, these, start, stop in zip(data, moves, bounds[:-1], bounds[1:], strict=True):
                wanted[start : stop - 1] = td_targets(
                    [move.reward for move in these],
                    known[start:stop].tolist(),
                    [move.gamma for move in these],
                    lam=self.config.lam,
                    cut=one.trajectory.truncated,
                )
            return (wanted - centre) / unit

        return targets

    def _moves(self, scored: ScoredTrajectory) -> list[_Move]:
        """What lies between a place and the next one."""
        steps = steps_by_turn(scored)
        moves: list[_Move] = []
        for turn in scored.trajectory.turns:
            keys = steps.get(turn.index)
            if not keys:
                raise CreditError(f"trajectory {scored.trajectory.id}: turn {turn.index} has no step")
            inner = keys[:-1] if self.config.level == "step" else []
            moves += [_Move(key, 1.0, 0.0) for key in inner]
            moves.append(_Move(keys[-1], self.config.gamma, turn.reward))
        return moves


class _Move(NamedTuple):
    """From a place to the next: the step that makes it, its discount, and what the environment paid for it."""

    key: tuple[int, int]
    gamma: float
    reward: float


def _part(arrays: Arrays, name: str) -> dict[str, NDArray[Any]]:
    return {key.partition(".")[2]: one for key, one in arrays.items() if key.partition(".")[0] == name}
