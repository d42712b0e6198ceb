"""Exports of a tiny policy: right ones are proved, deliberately broken ones fail loudly and leave nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slea_llm.errors import ConfigError, ExportError, StorageError
from slea_llm.export import export, verify, write
from slea_llm.export_links import ADAPTER, MERGED, check_base_name, load_adapter
from slea_llm.export_proof import default_probes
from slea_llm.folders import changed_files, read_manifest, write_manifest
from slea_llm.models.loading import load_base
from slea_llm.models.policy import PolicyCritic, build
from slea_llm.models.tiny import make_tiny
from slea_llm.settings import ExportSettings, ModelSettings

pytestmark = pytest.mark.integration

NO_ENGINE = ExportSettings(form="both", probes=5, verify_engine=False)
NAME = "org/base-0.5b"
WEIGHTS = "adapter_model.safetensors"
TEXTS = ("two bowls of noodle soup to garden street", "the capital of france")


def trained_policy(
    base: Path, *, dtype: Any = "float32", declared: str | None = NAME, size: float = 0.05
) -> PolicyCritic:
    """A policy whose adapter was moved by `size` times noise, as training would."""
    settings = ModelSettings(base=str(base), declared_base=declared, dtype=dtype, lora_rank=8, critic_rank=8)
    model = build(settings, streams=["outcome"], temperature=0.7, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.policy_parameters():
            if "lora_B" in name:
                parameter.copy_(size * torch.randn(parameter.shape, generator=generator))
    return model.eval()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("base"), TEXTS, vocab_size=300, hidden=64, layers=2, heads=2, seed=0)


@pytest.fixture(scope="module")
def model(base: Path) -> PolicyCritic:
    return trained_policy(base)


@pytest.fixture(scope="module")
def written(model: PolicyCritic, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A right export, to be copied and broken."""
    folder = tmp_path_factory.mktemp("export")
    write(model, folder, form="both", policy_version=3)
    return folder


@pytest.fixture
def copy(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "copy"))


def prove(model: PolicyCritic, folder: Path, *, allow_unchanged: bool = False) -> None:
    verify(model, folder, generator_factory=None, probes=default_probes(5), allow_unchanged=allow_unchanged)


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    """Change tensors and make the manifest say that they are right."""
    path = next(folder.glob("*.safetensors"))
    save_file(change(load_file(path)), path, metadata={"format": "pt"})
    write_manifest(folder, read_manifest(folder))


def files(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_right_export_is_proved_and_says_so(model: PolicyCritic, tmp_path: Path) -> None:
    report = export(model, tmp_path, name="out", settings=NO_ENGINE, policy_version=3)
    assert [link.name for link in report.links] == [
        "the adapter reloaded by PEFT",
        "the reloaded adapter merged by PEFT",
        "the merged weights reloaded",
    ]
    assert all(link.share == pytest.approx(1, abs=1e-3) for link in report.links)
    assert report.change.largest > 0.01
    for kind in (ADAPTER, MERGED):
        manifest = read_manifest(tmp_path / "out" / kind)
        assert changed_files(tmp_path / "out" / kind) == []
        assert manifest["base"] == NAME
        assert manifest["policy_version"] == 3
        assert len(manifest["proof"]["links"]) == 3
        assert manifest["proof"]["links"][0]["difference_nats"]["largest"] <= 1e-4
    assert "written: " in report.lines()[0]


@pytest.mark.parametrize("form", [ADAPTER, MERGED])
def test_each_form_alone(model: PolicyCritic, tmp_path: Path, form: Any) -> None:
    settings = ExportSettings(form=form, probes=2, verify_engine=False)
    report = export(model, tmp_path, name="out", settings=settings, policy_version=0)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [form]
    assert (report.adapter is None, report.merged is None) == (form != ADAPTER, form != MERGED)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_other_types_hold_too(base: Path, tmp_path: Path, dtype: Any) -> None:
    report = export(trained_policy(base, dtype=dtype), tmp_path, name="out", settings=NO_ENGINE, policy_version=0)
    assert all(link.share == pytest.approx(1, abs=0.1) for link in report.links)


def test_br_031_keys_load_without_missing_and_the_reload_is_the_trained_model(
    model: PolicyCritic, written: Path
) -> None:
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert key in load_file(written / ADAPTER / WEIGHTS)
    reloaded = load_adapter(load_base(model.settings), written / ADAPTER)
    ids = torch.tensor([[5, 9, 2, 7, 11]])
    with torch.no_grad():
        trained = model.model.base_model.model(ids).logits
        assert float((reloaded(ids).logits - trained).abs().max()) <= 1e-5
        with reloaded.disable_adapter():
            assert float((reloaded(ids).logits - trained).abs().max()) > 1e-3


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("base_model.", "module.base_model."),
        (".lora_A.weight", ".lora_A.policy.weight"),
        ("self_attn.q_proj", "attn.q"),
    ],
)
def test_br_031_renamed_keys_fail_loudly(model: PolicyCritic, copy: Path, before: str, after: str) -> None:
    rewrite(copy / ADAPTER, lambda tensors: {key.replace(before, after): value for key, value in tensors.items()})
    with pytest.raises(ExportError, match=r"would load as the base model: \d+ tensors are missing"):
        prove(model, copy)


def test_one_missing_tensor_fails(model: PolicyCritic, copy: Path) -> None:
    rewrite(copy / ADAPTER, lambda tensors: dict(list(tensors.items())[1:]))
    with pytest.raises(ExportError, match="1 tensors are missing"):
        prove(model, copy)


def test_a_tampered_file_fails_by_its_checksum(model: PolicyCritic, copy: Path) -> None:
    path = copy / ADAPTER / WEIGHTS
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(ExportError, match=f"not what the manifest says: {WEIGHTS}"):
        prove(model, copy)


@pytest.mark.parametrize("kind", [ADAPTER, MERGED])
def test_a_tampered_tensor_fails_even_with_a_fitting_manifest(model: PolicyCritic, copy: Path, kind: str) -> None:
    def one_tensor(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        key = next(key for key in tensors if "down_proj" in key and "lora_A" not in key)
        return {**tensors, key: tensors[key] * 1.5}

    rewrite(copy / kind, one_tensor)
    with pytest.raises(ExportError, match=r"is not what was trained|does not serve what was trained"):
        prove(model, copy)


def test_an_exported_adapter_of_zeros_serves_the_base(model: PolicyCritic, copy: Path) -> None:
    rewrite(copy / ADAPTER, lambda tensors: {key: torch.zeros_like(value) for key, value in tensors.items()})
    with pytest.raises(ExportError, match="it serves the base model, without the adapter"):
        prove(model, copy)


def test_merged_weights_without_the_adapter_serve_the_base(model: PolicyCritic, base: Path, copy: Path) -> None:
    plain = load_file(base / "model.safetensors")
    rewrite(copy / MERGED, lambda _: plain)
    with pytest.raises(ExportError, match=r"merged weights reloaded does not serve.*without the adapter"):
        prove(model, copy)


def test_an_adapter_that_does_nothing_is_refused_unless_allowed(base: Path, tmp_path: Path) -> None:
    fresh = trained_policy(base, size=0.0)
    with pytest.raises(ExportError, match="the adapter does nothing"):
        export(fresh, tmp_path, name="out", settings=NO_ENGINE, policy_version=0)
    assert list(tmp_path.iterdir()) == []
    report = export(fresh, tmp_path, name="out", settings=NO_ENGINE, policy_version=0, allow_unchanged=True)
    assert report.change.none
    assert "changes nothing (allowed)" in "\n".join(report.lines())


def test_another_base_than_the_one_trained_on_is_noticed(base: Path, tmp_path: Path) -> None:
    own = Path(shutil.copytree(base, tmp_path / "own"))
    model = trained_policy(own)
    write(model, tmp_path / "out", form="adapter", policy_version=0)
    other = make_tiny(tmp_path / "other", TEXTS, vocab_size=300, hidden=64, layers=2, heads=2, seed=9)
    (other / "model.safetensors").replace(own / "model.safetensors")  # the trained model still maps the old file
    with pytest.raises(
        ExportError, match="adapter reloaded by PEFT does not serve what was trained: it is another model"
    ):
        prove(model, tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "value"),
    [("base_model_name_or_path", "org/other"), ("r", 4), ("lora_alpha", 1), ("revision", "main"), ("use_dora", True)],
)
def test_a_configuration_that_does_not_fit_is_named(model: PolicyCritic, copy: Path, name: str, value: object) -> None:
    path = copy / ADAPTER / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    write_manifest(copy / ADAPTER, read_manifest(copy / ADAPTER))
    with pytest.raises(ExportError, match=f"{name} is"):
        prove(model, copy)


def test_br_033_two_exports_are_byte_identical_and_name_their_base(base: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        export(trained_policy(base), tmp_path, name=name, settings=NO_ENGINE, policy_version=3)
    assert files(tmp_path / "one") == files(tmp_path / "two")
    config = json.loads((tmp_path / "one" / ADAPTER / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == NAME
    assert config["target_modules"] == sorted(config["target_modules"])
    assert NAME in (tmp_path / "one" / ADAPTER / "README.md").read_text()


def test_br_033_a_temporary_base_without_a_declared_name_is_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"temporary folder.*model.declared_base"):
        export(trained_policy(base, declared=None), tmp_path, name="out", settings=NO_ENGINE, policy_version=0)
    assert list(tmp_path.iterdir()) == []


def test_the_card_says_on_which_folder_a_base_of_another_name_lies(base: Path, tmp_path: Path) -> None:
    export(trained_policy(base), tmp_path, name="one", settings=NO_ENGINE, policy_version=3)
    card = (tmp_path / "one" / ADAPTER / "README.md").read_text()
    assert f"trained on the folder `{base.name}`" in card
    assert str(base.parent) not in card


@pytest.mark.parametrize("name", [None, "", "  ", "/tmp/x", "/dev/shm/base"])  # noqa: S108  these are the cases
def test_br_033_names_that_lead_nowhere_are_refused(name: str | None) -> None:
    with pytest.raises(ExportError, match=r"model\.declared_base"):
        check_base_name(name)


@pytest.mark.parametrize("name", ["org/base-0.5b", "runs/demo-base", "/srv/models/base"])
def test_br_033_names_that_last_are_taken(name: str) -> None:
    assert check_base_name(name) == name


def test_br_033_a_folder_below_the_working_directory_lasts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert check_base_name(str(tmp_path / "runs" / "base")) == str(tmp_path / "runs" / "base")


def test_br_034_merged_weights_keep_the_type_and_size_of_the_base(base: Path, tmp_path: Path) -> None:
    settings = ExportSettings(form="merged", probes=2, verify_engine=False)
    export(trained_policy(base, dtype="bfloat16"), tmp_path, name="out", settings=settings, policy_version=0)
    merged = load_file(tmp_path / "out" / MERGED / "model.safetensors")
    assert {tensor.dtype for tensor in merged.values()} == {torch.bfloat16}
    in_16_bit = (base / "model.safetensors").stat().st_size / 2
    assert (tmp_path / "out" / MERGED / "model.safetensors").stat().st_size <= 1.05 * in_16_bit
    config = json.loads((tmp_path / "out" / MERGED / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert config["use_cache"] is True


def test_br_034_merged_weights_in_another_type_are_refused(base: Path, tmp_path: Path) -> None:
    model = trained_policy(base, dtype="bfloat16")
    write(model, tmp_path, form="merged", policy_version=0)
    rewrite(tmp_path / MERGED, lambda tensors: {key: value.float() for key, value in tensors.items()})
    with pytest.raises(ExportError, match="tensors are not bfloat16"):
        prove(model, tmp_path)


def test_br_036_resized_embeddings_are_refused(base: Path, tmp_path: Path) -> None:
    model = trained_policy(base)
    rows = model.model.get_input_embeddings().weight.shape[0]
    model.model.base_model.model.resize_token_embeddings(rows + 3, mean_resizing=False)
    settings = ExportSettings(form="adapter", probes=2, verify_engine=False)
    with pytest.raises(ExportError, match=f"{rows + 3} embedding rows and its base {rows}"):
        export(model, tmp_path, name="out", settings=settings, policy_version=0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["../out", "a; touch MARK", "x/../../y", "n" * 300])
def test_br_093_unsafe_names_are_refused_and_nothing_is_written(
    model: PolicyCritic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    monkeypatch.chdir(inside)
    with pytest.raises(StorageError, match="not a safe name"):
        export(model, inside, name=name, settings=NO_ENGINE, policy_version=0)
    assert [path.name for path in tmp_path.rglob("*")] == ["inside"]


def test_an_existing_export_is_never_overwritten_unless_asked(model: PolicyCritic, tmp_path: Path) -> None:
    settings = ExportSettings(form="adapter", probes=2, verify_engine=False)
    export(model, tmp_path, name="out", settings=settings, policy_version=1)
    before = files(tmp_path)
    with pytest.raises(StorageError, match="exists already"):
        export(model, tmp_path, name="out", settings=settings, policy_version=2)
    assert files(tmp_path) == before
    export(model, tmp_path, name="out", settings=settings, policy_version=2, overwrite=True)
    assert read_manifest(tmp_path / "out" / ADAPTER)["policy_version"] == 2


def test_a_proof_with_an_engine_needs_one(model: PolicyCritic, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"export\.verify_engine is on"):
        export(model, tmp_path, name="out", settings=ExportSettings(), policy_version=0)


def test_br_095_a_secret_in_the_environment_reaches_no_exported_file(
    model: PolicyCritic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "wk-0000FAKE")
    monkeypatch.setenv("HF_TOKEN", "hf_0000FAKE")
    export(model, tmp_path, name="out", settings=NO_ENGINE, policy_version=0)
    assert not any(b"0000FAKE" in content for content in files(tmp_path).values())
