"""A dialogue as tokens: every step has its place, whatever the tokenizer makes of its text; padding hides nothing."""

from __future__ import annotations

import dataclasses
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slea_llm.errors import ConfigError, EvaluatorError, TemplateError
from slea_llm.evaluators.causal_reward_model import CausalRewardModel
from slea_llm.models.chat import ChatTokenizer
from slea_llm.models.step_reader import Opened, Row, batches, open_reader, probe, row_of
from slea_llm.settings import ModelSettings
from slea_llm.types import Message, Span, Step, ToolCall, Trajectory
from tests.support import tokenizers as kinds
from tests.support.judged import cut, of_replies
from tests.support.signals import write_base

KINDS = ("byte_level", "word_level", "unigram", "unigram_first", "byte_fallback")


@cache
def chat_of(kind: str, template: str = kinds.CHATML) -> ChatTokenizer:
    return ChatTokenizer(kinds.all_kinds(template)[kind])


def spoken(pieces: list[list[str]]) -> tuple[Trajectory, list[Step]]:
    """A dialogue whose replies are these texts one after another, each text a step."""
    one = of_replies("t", ["".join(texts) for texts in pieces])
    turns = tuple(dataclasses.replace(turn, text="".join(texts)) for turn, texts in zip(one.turns, pieces, strict=True))
    steps = []
    for turn, texts in enumerate(pieces):
        at = 0
        for index, text in enumerate(texts):
            span = Span(at, at + len(text))
            steps.append(Step(trajectory_id="t", turn=turn, index=index, kind="reply", text=text, span=span))
            at += len(text)
    return dataclasses.replace(one, turns=turns), steps


@pytest.mark.parametrize("kind", KINDS)
@given(
    pieces=st.lists(
        st.lists(st.text(alphabet="abehlot .,'\n我要京", min_size=1, max_size=8), min_size=1, max_size=4),
        min_size=1,
        max_size=3,
    )
)
@settings(deadline=None, max_examples=25)
def test_br_061_every_step_has_one_place_in_the_tokens_of_every_tokenizer(kind: str, pieces: list[list[str]]) -> None:
    """No marker is searched: three steps are three places, also where their texts become other ids in context."""
    chat = chat_of(kind)
    one, steps = spoken(pieces)
    row = row_of(chat, one, steps, longest=10_000)
    assert len(row.places) == len(steps) + 1
    assert list(row.places) == sorted(row.places)
    assert row.places[-1] == len(row) - 1
    assert row.beyond == 0
    ends = [i for i, token in enumerate(row.ids) if token == chat.end_of_turn.id]
    last = {}
    for step, place in zip(steps, row.places[1:], strict=True):
        last[step.turn] = place
    # The end of turn belongs to the last step of its turn.
    assert set(last.values()) <= set(ends)
    at = 0
    for turn, texts in enumerate(pieces):
        places = row.places[1 + at : 1 + at + len(texts)]
        alone = chat.encode_pieces(texts)
        assert [b - a for a, b in pairwise(places)] == [
            len(ids) + (number == len(texts) - 1) for number, ids in enumerate(alone) if number
        ], turn
        at += len(texts)


def test_br_061_steps_that_are_not_those_of_the_text_are_an_error() -> None:
    one, steps = spoken([["ab ", "cd ", "ef"]])
    assert len(row_of(chat_of("byte_level"), one, steps, longest=999).places) == 4
    for wrong in (steps[:2], steps[1:], [steps[1], steps[0], steps[2]]):
        with pytest.raises(EvaluatorError, match="do not make up its text"):
            row_of(chat_of("byte_level"), one, wrong, longest=999)
    with pytest.raises(EvaluatorError, match="has no turn 5"):
        row_of(chat_of("byte_level"), one, [*steps, dataclasses.replace(steps[0], turn=5)], longest=999)


def test_the_tokens_are_those_of_the_models_own_template() -> None:
    for template in (kinds.CHATML, kinds.SMOLLM2, kinds.LLAMA3):
        chat = chat_of("byte_level", template)
        one, steps = spoken([["Which date?"], ["Booked."]])
        rendered = chat._tokenizer.apply_chat_template(
            [
                {"role": "user", "content": "I want to order, word 0"},
                {"role": "assistant", "content": "Which date?"},
                {"role": "user", "content": "I want to order, word 1"},
                {"role": "assistant", "content": "Booked."},
            ],
            tokenize=False,
        )
        own = chat._tokenizer(rendered, add_special_tokens=False)["input_ids"]
        row = row_of(chat, one, steps, longest=999)
        assert list(row.ids) == own[: len(row)]
        assert row.ids[-1] == chat.end_of_turn.id


def test_a_reply_cut_by_its_length_has_no_end_of_turn_and_calls_are_read_as_text() -> None:
    chat = chat_of("byte_level")
    one, steps = spoken([["abc"]])
    turn = dataclasses.replace(one.turns[0], finish_reason="length")
    row = row_of(chat, dataclasses.replace(one, turns=(turn,)), steps, longest=999)
    assert row.ids[-1] != chat.end_of_turn.id
    called = Message(role="assistant", content="", tool_calls=(ToolCall(id="1", name="f", arguments='{"a": 1}'),))
    turn = dataclasses.replace(one.turns[0], context=(*one.turns[0].context, called, *one.turns[0].context))
    row = row_of(chat, dataclasses.replace(one, turns=(turn,)), steps, longest=999)
    assert '{"name": "f", "arguments": {"a": 1}}' in chat.text(row.ids)
    silent = dataclasses.replace(one, turns=(dataclasses.replace(one.turns[0], context=()),))
    assert len(row_of(chat, silent, steps, longest=999).places) == 2


@given(longest=st.integers(2, 80))
@settings(deadline=None, max_examples=40)
def test_what_is_too_long_loses_its_last_places_and_says_how_many(longest: int) -> None:
    one, steps = spoken([["What date ", "and time?"], ["Booked ", "for you."]])
    whole = row_of(chat_of("byte_level"), one, steps, longest=999)
    row = row_of(chat_of("byte_level"), one, steps, longest=longest)
    assert row.places == tuple(place for place in whole.places if place < longest)
    assert row.beyond == len(whole.places) - len(row.places)
    assert row.ids == whole.ids[: len(row)]
    assert len(row) <= longest


@given(lengths=st.lists(st.integers(0, 40), max_size=20), tokens=st.integers(1, 100))
def test_batches_hold_every_row_that_is_read_once(lengths: list[int], tokens: int) -> None:
    rows = [Row(ids=(1,) * length, places=(length - 1,) if length else ()) for length in lengths]
    found = list(batches(rows, tokens))
    assert sorted(index for batch in found for index in batch) == [i for i, length in enumerate(lengths) if length]
    assert all(len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= tokens for batch in found)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Opened:
    base = write_base(tmp_path_factory.mktemp("base"))
    return open_reader(ModelSettings(base=str(base), lora_rank=4, lora_alpha=8), longest=256, device="cpu")


def test_br_059_the_score_is_read_at_the_last_real_token_also_where_padding_has_its_id(opened: Opened) -> None:
    """The case's ids end with the id that also pads: index 5 is read, never the first one that looks like padding."""
    pad = 2
    ids = (5, 2, 6, 2, 7, 2)
    row = Row(ids=ids, places=(len(ids) - 1,))
    longer = Row(ids=(5, 6, 7, *(8,) * 20), places=(3, 22))
    with torch.no_grad():
        alone = opened.reader.states([row])
        whole = opened.reader.states([Row(ids=ids, places=tuple(range(6)))])
        together = opened.reader.states([row, longer])
    assert row.ids[row.places[0]] == pad
    torch.testing.assert_close(alone[0, 0], whole[0, 5])
    torch.testing.assert_close(together[0, 0], alone[0, 0], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(alone[0, 0], whole[0, 1])


def test_a_fresh_reader_says_nothing_and_reads_the_bare_base(opened: Opened) -> None:
    one = of_replies("t", ["wait now"])
    row = row_of(opened.chat, one, cut(one), longest=opened.longest)
    before = opened.reader.tensors()
    assert not opened.reader([row]).any()
    changed = {name: tensor + 0.1 for name, tensor in before.items()}
    seen = probe(opened)
    opened.reader.load(changed, source="here")
    assert opened.reader([row]).any()
    assert probe(opened) != seen
    opened.reader.reset()
    assert all(torch.equal(tensor, before[name]) for name, tensor in opened.reader.tensors().items())
    assert probe(opened) == seen


def test_a_template_that_rewrites_earlier_messages_is_refused(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    (base / "chat_template.jinja").write_text(kinds.MOVING_SYSTEM, encoding="utf-8")
    settings_of = ModelSettings(base=str(base), lora_rank=4, lora_alpha=8)
    # Without a system prompt this one only appends.
    assert open_reader(settings_of, longest=64, device="cpu").longest == 64
    (base / "chat_template.jinja").write_text(
        "{% for message in messages %}{% if loop.last or message['role'] == 'user' %}"
        "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        encoding="utf-8",
    )
    with pytest.raises(TemplateError):
        open_reader(settings_of, longest=64, device="cpu")


def test_faulty_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"read 'labels' .*did you mean 'label'"):
        CausalRewardModel.Config(read="labels")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="batch_tokens 0"):
        CausalRewardModel.Config(batch_tokens=0)
