"""The Llama model: names and shapes, numerics, initialization, recomputation."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fullshard.train.config import ModelConfig
from fullshard.train.llama import LlamaForCausalLM, LlamaRMSNorm, build_llama, rotate

SMALL = ModelConfig(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48
)


def expected_shapes() -> dict[str, tuple[int, ...]]:
    """What `LlamaForCausalLM` of transformers has for the same configuration."""
    block = {
        "self_attn.q_proj.weight": (32, 32),
        "self_attn.k_proj.weight": (16, 32),
        "self_attn.v_proj.weight": (16, 32),
        "self_attn.o_proj.weight": (32, 32),
        "mlp.gate_proj.weight": (48, 32),
        "mlp.up_proj.weight": (48, 32),
        "mlp.down_proj.weight": (32, 48),
        "input_layernorm.weight": (32,),
        "post_attention_layernorm.weight": (32,),
    }
    layers = {f"model.layers.{index}.{name}": shape for index in range(2) for name, shape in block.items()}
    ends = {"model.embed_tokens.weight": (256, 32), "model.norm.weight": (32,), "lm_head.weight": (256, 32)}
    return {**layers, **ends}


def tokens(length: int = 10) -> Tensor:
    return torch.arange(2 * length).reshape(2, length) * 7 % 256


def test_names_and_shapes_are_those_of_hugging_face() -> None:
    model = LlamaForCausalLM(SMALL)
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == expected_shapes()
    assert set(model.state_dict()) == set(expected_shapes())  # the rotary frequencies are not saved
    assert type(model.model.layers[0]).__name__ == "LlamaDecoderLayer"


def test_tied_embeddings_are_one_parameter() -> None:
    model = LlamaForCausalLM(ModelConfig(num_hidden_layers=1, tie_word_embeddings=True))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in dict(model.named_parameters())


def test_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    first = build_llama(SMALL, seed=3)
    state = torch.get_rng_state()
    torch.manual_seed(2)
    second = build_llama(SMALL, seed=3)
    other = build_llama(SMALL, seed=4)
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    torch.manual_seed(1)
    assert torch.equal(state, torch.get_rng_state())  # building draws nothing from the caller's generator


def test_meta_model_is_filled_by_reset_parameters() -> None:
    reference = LlamaForCausalLM(SMALL)
    with torch.device("meta"):
        model = LlamaForCausalLM(SMALL)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, float("nan"))
    for module in model.modules():
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()
    assert torch.equal(model.model.rotary_emb.inv_freq, reference.model.rotary_emb.inv_freq)
    std = model.model.layers[0].mlp.gate_proj.weight.detach().std()
    assert math.isclose(float(std), SMALL.initializer_range, rel_tol=0.1)
    assert torch.isfinite(model(tokens())).all()


def test_a_token_sees_only_itself_and_what_came_before() -> None:
    model = LlamaForCausalLM(SMALL)
    ids = tokens()
    changed = ids.clone()
    changed[:, 6] += 1
    before, after = model(ids), model(changed)
    assert torch.equal(before[:, :6], after[:, :6])
    assert not torch.equal(before[:, 6:], after[:, 6:])


def test_rotary_scores_depend_on_the_distance_only() -> None:
    model = LlamaForCausalLM(SMALL)
    cos, sin = model.model.rotary_emb(20, torch.float32)
    query, key = torch.randn(8), torch.randn(8)
    rotated_query, rotated_key = (rotate(vector.expand(1, 1, 20, 8), cos, sin)[0, 0] for vector in (query, key))
    scores = rotated_query @ rotated_key.T
    torch.testing.assert_close(scores[3, 0], scores[13, 10])
    assert not torch.isclose(scores[3, 0], scores[4, 0])


def test_attention_equals_the_formula() -> None:
    attention = LlamaForCausalLM(SMALL).model.layers[0].self_attn
    hidden = torch.randn(1, 5, 32)
    cos, sin = torch.ones(5, 8), torch.zeros(5, 8)  # no rotation
    query = attention.q_proj(hidden)[0].view(5, 4, 8)
    key, value = (projection(hidden)[0].view(5, 2, 8) for projection in (attention.k_proj, attention.v_proj))
    heads = []
    for head in range(4):
        scores = query[:, head] @ key[:, head // 2].T / math.sqrt(8)
        scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
        heads.append(scores.softmax(-1) @ value[:, head // 2])
    expected = attention.o_proj(torch.cat(heads, dim=-1))
    torch.testing.assert_close(attention(hidden, cos, sin)[0], expected)


def test_norm_in_bfloat16_sums_in_float32() -> None:
    norm = LlamaRMSNorm(4096, eps=1e-5).to(torch.bfloat16)
    hidden = torch.randn(2, 4096).to(torch.bfloat16)
    wide = hidden.float()
    expected = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(torch.bfloat16)
    torch.testing.assert_close(norm(hidden), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recomputation_changes_no_gradient(dtype: torch.dtype) -> None:
    plain, recomputed = (build_llama(SMALL, seed=0, recompute=flag).to(dtype) for flag in (False, True))
    for model in (plain, recomputed):
        model(tokens()).float().square().mean().backward()
    for one, other in zip(plain.parameters(), recomputed.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)
