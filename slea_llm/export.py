"""The trained adapter or merged weights, written whole, then reloaded and proved equal to what was trained.

The chain: trainer = PEFT reload = merged weights = engine, each within a stated tolerance, and all different from the
base. A link that does not hold is an ExportError, and nothing stands under the export's name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedConfig

from slea_llm import __version__
from slea_llm.errors import ConfigError, ExportError
from slea_llm.export_links import (
    ADAPTER,
    MERGED,
    GeneratorFactory,
    base_of,
    check_base_name,
    check_engine,
    check_reloads,
    read_exactly,
)
from slea_llm.export_proof import Change, LinkFigures, default_probes, probe_rows
from slea_llm.folders import changed_files, refuse_existing, whole_folder, write_manifest
from slea_llm.models.chat import ChatTokenizer
from slea_llm.models.loading import load_tokenizer
from slea_llm.models.lora_ranks import check_rank
from slea_llm.redaction import environment_secrets, redact
from slea_llm.storage import safe_name
from slea_llm.types import Message

if TYPE_CHECKING:
    from slea_llm.models.policy import PolicyCritic
    from slea_llm.settings import ExportSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """What was written and what was proved about it."""

    folder: Path
    adapter: Path | None
    merged: Path | None
    change: Change
    links: tuple[LinkFigures, ...]

    def lines(self) -> list[str]:
        """The report for a reader, a line a link."""
        said = "changes nothing (allowed)" if self.change.none else f"largest {self.change.largest:.3g} nats"
        written = [f"written: {path}" for path in (self.adapter, self.merged) if path is not None]
        return [*written, f"change to the base: {said}, mean {self.change.mean:.3g}", *(x.line() for x in self.links)]


def export(
    model: PolicyCritic,
    folder: Path | str,
    *,
    settings: ExportSettings,
    policy_version: int,
    name: str = "export",
    generator_factory: GeneratorFactory | None = None,
    probes: Sequence[Sequence[Message]] | None = None,
    allow_unchanged: bool = False,
    overwrite: bool = False,
) -> ExportReport:
    """Write `folder/name/adapter` and `.../merged` as `settings.form` says, and prove them; all of it or nothing.

    `probes` are dialogues that end with the user's words (default: `settings.probes` fixed ones). Raises ConfigError
    for what can be refused beforehand, StorageError when the name is unsafe or its folder holds something or cannot be
    written, ExportError for a link that does not hold; an adapter that changes nothing is one, unless
    `allow_unchanged`.
    """
    target = Path(folder) / safe_name(name)
    refuse_existing(target, overwrite=overwrite)
    check_base_name(model.base_name)
    check_rank(model.settings.lora_rank)
    if settings.verify_engine and generator_factory is None:
        raise ConfigError("export.verify_engine is on, but no engine was given to the export; turn it off or name one")
    dialogues = default_probes(settings.probes) if probes is None else probes
    with whole_folder(target, overwrite=overwrite) as new:
        write(model, new, form=settings.form, policy_version=policy_version)
        report = verify(
            model,
            new,
            generator_factory=generator_factory if settings.verify_engine else None,
            probes=dialogues,
            allow_unchanged=allow_unchanged,
        )
        proof = {
            "change_to_base_nats": {"largest": report.change.largest, "mean": report.change.mean},
            "links": [link.facts() for link in report.links],
            "probes": len(dialogues),
        }
        for kind in _kinds(new):
            _write_manifest(model, new / kind, kind=kind, policy_version=policy_version, proof=proof)
    return replace(
        report,
        folder=target,
        adapter=target / ADAPTER if report.adapter else None,
        merged=target / MERGED if report.merged else None,
    )


def write(model: PolicyCritic, folder: Path, *, form: str, policy_version: int) -> None:
    """Write adapter and/or merged weights below `folder`, each with its manifest, unproved."""
    if form in (ADAPTER, "both"):
        model.save_adapter(folder / ADAPTER)
        (folder / ADAPTER / "README.md").write_text(_card(model), encoding="utf-8")
    if form in (MERGED, "both"):
        _write_merged(model, folder / MERGED)
    for kind in _kinds(folder):
        _write_manifest(model, folder / kind, kind=kind, policy_version=policy_version, proof=None)


def verify(
    model: PolicyCritic,
    folder: Path,
    *,
    generator_factory: GeneratorFactory | None,
    probes: Sequence[Sequence[Message]],
    allow_unchanged: bool = False,
) -> ExportReport:
    """Prove what lies in `folder` against the trained model; see the module's first lines.

    Raises ExportError at the first link that does not hold.
    """
    kinds = _kinds(folder)
    if not kinds:
        raise ExportError(f"{folder} holds neither {ADAPTER} nor {MERGED}")
    for kind in kinds:
        changed = changed_files(folder / kind)
        if changed:
            raise ExportError(
                f"files of {folder / kind} are missing or not what the manifest says: {', '.join(changed)}"
            )
    rows = probe_rows(ChatTokenizer(load_tokenizer(model.settings)), probes)
    reading = read_exactly(model, rows)
    change = reading.change
    if change.none and not allow_unchanged:
        raise ExportError(
            f"the adapter does nothing: no log-probability of {len(reading.base)} differs from the base by more than "
            f"{change.largest:.2g} nats. Train for more iterations than trainer.critic_warmup_iterations, or allow an "
            "unchanged one (--allow-unchanged, for a run with learning rate 0)"
        )
    links = check_reloads(model, folder, rows, reading, allow_unseen=allow_unchanged)
    if generator_factory is not None:
        check = partial(check_engine, unchanged=change.none, allow_unseen=allow_unchanged)
        links += [check(model, folder, kind, rows, generator_factory) for kind in kinds]
    return ExportReport(
        folder=folder,
        adapter=folder / ADAPTER if ADAPTER in kinds else None,
        merged=folder / MERGED if MERGED in kinds else None,
        change=change,
        links=tuple(links),
    )


def _kinds(folder: Path) -> list[str]:
    return [kind for kind in (ADAPTER, MERGED) if (folder / kind).is_dir()]


def _write_merged(model: PolicyCritic, folder: Path) -> None:
    """A Hugging Face folder of the policy in the base's type, with tokenizer and generation config."""
    holder = base_of(model)
    merged = dict(model.merged_weights())
    parameters = dict(holder.named_parameters())  # tied weights appear once, on both sides
    if merged.keys() != parameters.keys():
        odd = sorted(merged.keys() ^ parameters.keys())
        raise ExportError(f"merged weights and base model differ in {len(odd)} tensor names, the first {odd[0]}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(merged[name])
    original, _ = PreTrainedConfig.get_config_dict(model.settings.base, revision=model.settings.revision)
    holder.config.use_cache = original.get("use_cache", True)  # off in training only
    holder.save_pretrained(folder)
    load_tokenizer(model.settings).save_pretrained(folder)


def _write_manifest(
    model: PolicyCritic, folder: Path, *, kind: str, policy_version: int, proof: dict[str, Any] | None
) -> None:
    facts = {
        "kind": kind,
        "base": model.base_name,
        "revision": model.settings.revision,
        "dtype": model.settings.dtype,
        "rank": model.settings.lora_rank,
        "alpha": model.settings.lora_alpha,
        "temperature": model.temperature,
        "policy_version": policy_version,
        "versions": {"slea-llm": __version__, **{name: version(name) for name in ("torch", "transformers", "peft")}},
        "proof": proof,
    }
    write_manifest(folder, redact(facts, secrets=environment_secrets()))


def _card(model: PolicyCritic) -> str:
    revision = f', revision="{model.settings.revision}"' if model.settings.revision else ""
    folder = Path(model.settings.base)
    elsewhere = (
        f"It was trained on the folder `{folder.name}`, to which the run gave that name: where nothing is published "
        "under it, put the path of the folder in its place below.\n\n"
        if model.settings.declared_base and folder.is_dir()
        else ""
    )
    return (
        f"---\nbase_model: {model.base_name}\nlibrary_name: peft\n---\n\n"
        f"# LoRA adapter for {model.base_name}\n\n{elsewhere}"
        "manifest.json says which files belong to it and what was compared with what.\n\n"
        "```python\n"
        "from peft import PeftModel\n"
        "from transformers import AutoModelForCausalLM\n\n"
        f'base = AutoModelForCausalLM.from_pretrained("{model.base_name}"{revision}, dtype="{model.settings.dtype}")\n'
        'model = PeftModel.from_pretrained(base, "path/of/this/folder")\n'
        "```\n\n"
        "```sh\n"
        f"vllm serve {model.base_name} --enable-lora --max-lora-rank {check_rank(model.settings.lora_rank)} "
        "--lora-modules agent=path/of/this/folder\n"
        "```\n"
    )
