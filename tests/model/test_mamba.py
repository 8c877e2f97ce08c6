"""Mamba-2 against that of transformers, in training and in rollout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers.models.nemotron_h.configuration_nemotron_h import NemotronHConfig
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer

from hpcrl.model.blocks.block import half_layer
from hpcrl.model.blocks.mamba import Mamba
from hpcrl.model.blocks.norms import Norms
from hpcrl.model.build import build_model
from hpcrl.model.families.config_json import shape_from_hf
from hpcrl.model.gpt import pack
from hpcrl.model.params import check_adapters, role_layout
from hpcrl.model.shape import Lora, ModelShape, forward_flops
from hpcrl.rollout.engines.tensorrt_llm.declaration import check_model as check_tensorrt_llm
from hpcrl.rollout.engines.vllm.declaration import check_model as check_vllm
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.groups import fake_rank
from hpcrl.runtime.layout import Layout
from tests.kernels.close import assert_near
from tests.model.families import make_model
from tests.model.test_gated_delta import LENGTHS, SIZE, in_parts, inputs
from tests.rollout.small_model import SHAPE

LEAST_DT = 0.3  # larger than many
BLOCK = Mamba(SHAPE.hidden_size, num_heads=4, head_dim=12, num_groups=2, state_dim=16, least_dt=LEAST_DT)


def alternating(shape: ModelShape) -> ModelShape:
    """Mamba, attention, Mamba, an MLP, and so on."""
    mixer = half_layer(BLOCK, "attention", Norms())
    attention, mlp = (
        half_layer(block, half, Norms())
        for block, half in zip(shape.layers[0].blocks, ("attention", "mlp"), strict=True)
    )
    kinds = mixer, attention, mixer, mlp
    return replace(shape, blocks=tuple(kinds[layer % 4] for layer in range(shape.num_layers)))


@pytest.fixture(scope="module", params=[True, False], ids=["bias", "no_bias"])
def block(request: pytest.FixtureRequest) -> Mamba:
    return replace(BLOCK, has_conv_bias=request.param)


@pytest.fixture(scope="module")
def module(block: Mamba) -> Iterator[torch.nn.Module]:
    shape = replace(SHAPE, num_layers=1, blocks=(half_layer(block, "attention", Norms()),))
    with fake_rank(Layout((0,)), 0) as groups:
        (chunk,) = build_model(shape, groups, seed=1)
        net, generator = chunk.decoder.layers[0].self_attention, torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, weight in net.named_parameters():
                weight.copy_(0.5 * torch.randn(weight.shape, generator=generator) + (name == "norm.weight"))
        yield net


def in_files(name: str, rows: Tensor) -> Tensor:
    """Rows of one group after the other -> in the order of the files, all groups of a kind after the other."""
    kinds = {"in_proj.weight": "zxBC", "conv1d.weight": "xBC", "conv1d.bias": "xBC"}.get(name)
    if kinds is None:
        return rows
    sizes = [BLOCK.rows_of_group[kind] for kind in kinds]
    if name == "in_proj.weight":
        sizes.append(BLOCK.rows_of_group["dt"])
    return torch.cat([part.flatten(0, 1) for part in rows.unflatten(0, (BLOCK.num_groups, -1)).split(sizes, 1)])


@pytest.fixture(scope="module")
def reference(module: torch.nn.Module, block: Mamba) -> NemotronHMamba2Mixer:
    config = NemotronHConfig(
        hidden_size=SHAPE.hidden_size,
        layers_block_type=["linear_attention"],
        mamba_num_heads=BLOCK.num_heads,
        mamba_head_dim=BLOCK.head_dim,
        n_groups=BLOCK.num_groups,
        ssm_state_size=BLOCK.state_dim,
        conv_kernel=BLOCK.conv_width,
        use_conv_bias=block.has_conv_bias,
        chunk_size=32,
        time_step_min=LEAST_DT,
        layer_norm_epsilon=SHAPE.rms_norm_eps,
    )
    net = NemotronHMamba2Mixer(config, 0)
    net.load_state_dict({name: in_files(name, weight.detach()) for name, weight in module.named_parameters()})
    return net


def test_outputs_and_gradients_are_those_of_transformers(
    module: torch.nn.Module, reference: NemotronHMamba2Mixer
) -> None:
    x, y = inputs().requires_grad_(), inputs().requires_grad_()
    packed = pack(torch.zeros(sum(LENGTHS), dtype=torch.int64), torch.tensor(LENGTHS), SHAPE, size=SIZE)
    found = module(x.unsqueeze(1), None, packed_seq_params=packed)[0].squeeze(1)
    tokens = sum(LENGTHS)
    expected = torch.cat([reference(part[None])[0] for part in y[:tokens].split(LENGTHS)])
    assert_near(found[:tokens], expected, torch.float32)
    assert not found[tokens:].any()
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
    (found[:tokens] * weight).sum().backward()
    (expected * weight).sum().backward()
    assert_near(x.grad, y.grad, torch.float32)
    of_library = dict(reference.named_parameters())
    for name, parameter in module.named_parameters():
        # Terms of a sum over all tokens cancel.
        factor = 5 if name in ("A_log", "dt_bias", "D") else 1
        assert_near(in_files(name, parameter.grad), of_library[name].grad, torch.float32, factor=factor)
    module.zero_grad()


@pytest.mark.parametrize("says_lengths", [True, False])
def test_parts_of_prompts_and_single_tokens_are_the_whole(
    module: torch.nn.Module, reference: NemotronHMamba2Mixer, block: Mamba, says_lengths: bool
) -> None:
    weights = dict(module.named_parameters(prefix="self_attention"))
    x = inputs()[:180].unflatten(0, (2, 90))
    with torch.no_grad():
        assert_near(in_parts(block, weights, x, says_lengths), reference(x), torch.float32)


def test_what_it_has_not_is_one_line() -> None:
    shape = alternating(SHAPE)
    message = r"placement.actor.cp=2: Mamba-2 \(layer 0\) has no context parallelism; use cp=1"
    with pytest.raises(InputError, match=message):
        role_layout(shape, "actor", ranks=(0, 1), cp=2)
    with pytest.raises(InputError, match="actor.tp=4 does not divide n_groups=2; use one of"):
        role_layout(shape, "actor", ranks=(0, 1, 2, 3), tp=4)
    check_adapters(shape, Layout((0,)), Lora(4, 8.0))


@pytest.mark.parametrize(("engine", "check"), [("tensorrt_llm", check_tensorrt_llm), ("vllm", check_vllm)])
def test_other_engines_refuse_it(engine: str, check: Callable[[ModelShape, int], None]) -> None:
    message = rf"rollout.engine={engine}: its layout of Mamba-2 \(layer 0\) is not known; use engine=native"
    with pytest.raises(InputError, match=message):
        check(alternating(SHAPE), 1)


def test_operations_do_not_grow_with_the_length() -> None:
    shape = replace(SHAPE, blocks=(half_layer(BLOCK, "attention", Norms()),) * SHAPE.num_layers)
    assert forward_flops(shape, [200], 0) == forward_flops(shape, [100, 100], 0)


LISTED = {"model_type": "nemotron_h", **make_model("nemotron-h").config.to_dict()}


def test_published_files_name_layers_by_letters() -> None:
    shape, kinds = shape_from_hf(LISTED), LISTED["layers_block_type"]
    older = [{"linear_attention": "mamba", "full_attention": "attention"}.get(kind, kind) for kind in kinds]
    assert shape_from_hf(LISTED | {"layers_block_type": older}).layers == shape.layers
    published = {key: value for key, value in LISTED.items() if key != "layers_block_type"}
    found = shape_from_hf(published | {"hybrid_override_pattern": "ME*-MME*", "num_hidden_layers": 99})
    assert found.layers == shape.layers and found.num_layers == 8


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"layers_block_type": None, "hybrid_override_pattern": "MX"},
            "hybrid_override_pattern='MX'; expected letters",
        ),
        ({"layers_block_type": None}, "no 'layers_block_type'"),
        ({"layers_block_type": ["mamba", 3]}, r"layers_block_type=\['mamba', 3\]; expected linear_attention, "),
        ({"n_groups": 3}, "n_groups=3 does not divide mamba_num_heads=8"),
        ({"ssm_state_size": -1}, "ssm_state_size=-1; expected a positive whole number"),
        ({"moe_latent_size": 64}, "moe_latent_size=64; only None is supported"),
        ({"use_bias": True}, "use_bias=True; only False is supported"),
    ],
)
def test_what_is_not_computed_is_one_line(change: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said) as caught:
        shape_from_hf(LISTED | change)
    assert "\n" not in str(caught.value)
