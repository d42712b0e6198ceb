"""One of two gloo processes that hold half of a policy each, by plain fully_shard; writes what it gathered."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

from slea_llm.batching import blank
from slea_llm.models.policy import PolicyCritic
from slea_llm.tensors import Batch
from tests.support import training


def fixed_batch() -> Batch:
    """Two rows of twelve tokens, the last eight of each sampled."""
    ids = torch.arange(24).view(2, 12) + 5
    on = torch.ones(2, 12, dtype=torch.bool)
    chosen = on & (torch.arange(12) >= 4)
    empty = blank(streams=len(training.STREAMS), pad_id=0, dtype=torch.float64)
    return dataclasses.replace(
        empty, input_ids=ids, attention_mask=on, policy_mask=chosen, value_mask=chosen, imitation_mask=~on
    )


def moved(model: PolicyCritic) -> PolicyCritic:
    """The policy with every trained weight one hundredth higher, set as a resumed run sets it."""
    model.load_trainable_state({name: tensor + 0.01 for name, tensor in model.trainable_state().items()})
    return model


def gradients(model: PolicyCritic) -> dict[str, torch.Tensor]:
    """Whole gradients of a fixed sum over log-probabilities and values, and the values that credit would read."""
    batch = fixed_batch()
    outputs = model(batch)
    weights = torch.linspace(-1, 1, 24, dtype=torch.float64).view(2, 12)
    ((outputs.logprobs * weights).sum() + outputs.values.sum()).backward()
    found = {"logprobs": outputs.logprobs.detach(), "values": outputs.values.detach()}
    for name, parameter in [*model.policy_parameters(), *model.critic_parameters()]:
        assert parameter.grad is not None, name
        gradient = parameter.grad
        found[f"gradient.{name}"] = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    # Last: a pass without a backward leaves the outermost parameters gathered, and those have no gradient.
    _, found["after"] = model.policy_pass(batch.input_ids, batch.attention_mask, batch.policy_mask)
    return found


def shard(model: PolicyCritic) -> PolicyCritic:
    """Shard block by block; every way into the model gathers what it needs."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.model.base_model.model.get_decoder().layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for name in ("policy_pass", "reference_pass", "reference_logprobs"):
        register_fsdp_forward_method(model, name)
    return model


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    assert dist.get_world_size() == 2
    model = moved(shard(training.policy(folder / "base")))
    own = folder / f"rank{dist.get_rank()}"
    model.save_adapter(own)
    save_file(dict(model.merged_weights()), own / "merged.safetensors")
    save_file(model.trainable_state(), own / "state.safetensors")
    save_file({name: tensor.contiguous() for name, tensor in gradients(model).items()}, own / "gradients.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
