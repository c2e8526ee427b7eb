"""CCA's elementwise part in C against torch's convolutions on each document alone, in fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from openzaya.kernels.cca import has_kernel, latent_qkv
from openzaya.kernels.norm import L2_FLOOR
from openzaya.model.rope import rotary_angles, rotate
from tests.kernels.native import PACKINGS, ROUNDING, check, exact, needs_kernels, normal, positions
from tests.oracle import relative_error

pytestmark = needs_kernels


class _Case:
    """Random inputs of one shape, and both ways to compute with them."""

    def __init__(self, rows, heads, kv_heads, dim, share=0.5, packed=True):
        self.rows, self.heads, self.kv_heads, self.dim = rows, heads, kv_heads, dim
        self.places = positions(rows)
        self.given = self.places if packed else None
        self.rotary = int(dim * share)
        self.angles = rotary_angles(self.places.long(), self.rotary, 100.0)
        channels = (heads + kv_heads) * dim
        width = channels + kv_heads * dim

        def parameter(seed, *shape, scale=1.0):
            return (scale * normal(seed, *shape, dtype=torch.float32)).requires_grad_()

        self.packed = normal(1, *self.places.shape, width).requires_grad_()
        self.parameters = [
            parameter(2, channels, 1, 2),
            parameter(3, channels, scale=0.3),
            parameter(4, channels, dim, 2, scale=(2 * dim) ** -0.5),
            parameter(5, channels, scale=0.3),
            (1 + parameter(6, kv_heads, scale=0.3)).detach().requires_grad_(),
        ]

    def native(self):
        depthwise, depthwise_bias, grouped, grouped_bias, temperature = self.parameters
        return latent_qkv(
            self.packed,
            (self.heads, self.kv_heads),
            self.given,
            (depthwise, depthwise_bias),
            (grouped, grouped_bias),
            temperature,
            self.angles,
        )

    def reference(self, packed, depthwise, depthwise_bias, grouped, grouped_bias, temperature):
        rows = []
        for b, lengths in enumerate(self.rows):
            parts, begin = [], 0
            for length in lengths:
                part = packed[b, begin : begin + length]
                parts.append(
                    self._document(
                        part, depthwise, depthwise_bias, grouped, grouped_bias, temperature
                    )
                )
                begin += length
            rows.append([torch.cat(x) for x in zip(*parts, strict=True)])
        return [torch.stack(x).transpose(1, 2) for x in zip(*rows, strict=True)]

    def _document(self, packed, depthwise, depthwise_bias, grouped, grouped_bias, temperature):
        length = packed.shape[0]
        heads, kv_heads, dim = self.heads, self.kv_heads, self.dim
        latent, value = packed.split([(heads + kv_heads) * dim, kv_heads * dim], -1)
        x = F.pad(latent.T[None], (2, 0))
        x = F.conv1d(x, depthwise, depthwise_bias, groups=latent.shape[-1])
        x = F.conv1d(x, grouped, grouped_bias, groups=heads + kv_heads)[0].T
        q, k = x.view(length, -1, dim).split([heads, kv_heads], 1)
        q0, k0 = latent.view(length, -1, dim).split([heads, kv_heads], 1)
        mean = (q0 + k0.repeat_interleave(heads // kv_heads, 1)) / 2
        q, k = q + mean, k + mean.view(length, kv_heads, -1, dim).mean(2)
        q, k = (u * dim**0.5 / u.norm(dim=-1, keepdim=True).clamp_min(L2_FLOOR) for u in (q, k))
        k = k * temperature[:, None]
        angles = rotary_angles(torch.arange(length)[None], self.rotary, 100.0)
        q, k = (rotate(u[None], [a.double() for a in angles])[0] for u in (q, k))
        now, late = value.chunk(2, -1)
        value = torch.cat([now, F.pad(late, (0, 0, 1, 0))[:length]], -1)
        return q, k, value.view(length, kv_heads, dim)

    def compare(self):
        results = self.native()
        assert all(type(x.grad_fn).__name__ == "_LatentQKVBackward" for x in results)
        precise = [exact(x) for x in (self.packed, *self.parameters)]
        expected = self.reference(*precise)
        grads = [normal(7 + i, *x.shape) for i, x in enumerate(results)]
        torch.autograd.backward(list(results), grads)
        torch.autograd.backward(list(expected), [g.double() for g in grads])
        for a, b in zip(results, expected, strict=True):
            assert a.dtype == torch.bfloat16
            check(a, b)
        assert torch.equal(results[2].double(), expected[2]), "values are only moved"
        for a, b in zip((self.packed, *self.parameters), precise, strict=True):
            assert a.grad.dtype == a.dtype
            # A temperature's gradient cancels in its sum over tokens and channels.
            check(a.grad, b.grad, 0.03 if a.shape == (self.kv_heads,) else ROUNDING)


@pytest.mark.parametrize("dim", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("seq", [1, 2, 3, 63, 64, 65, 130])
def test_lengths_and_head_sizes(seq, dim):
    if dim == 256 and seq > 65:
        seq = 66
    _Case([[seq], [seq]], 2, 1, dim, packed=False).compare()


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 3), (4, 1), (8, 1), (8, 2), (6, 3)])
def test_groups(heads, kv_heads):
    _Case([[70]], heads, kv_heads, 32, packed=False).compare()


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("dim", [32, 96])
def test_rotary_shares(dim, share):
    _Case([[67], [67]], 4, 2, dim, share, packed=False).compare()


@pytest.mark.parametrize("name", PACKINGS)
def test_packed_documents(name):
    _Case(PACKINGS[name], 4, 2, 32).compare()


def test_one_document_with_positions_is_the_same():
    a, b = (_Case([[70]], 4, 2, 32, packed=packed) for packed in (True, False))
    for x, y in zip(a.native(), b.native(), strict=True):
        assert torch.equal(x, y)


def test_a_row_that_begins_inside_a_document():
    """Positions that do not start at zero: what is not in the row is zero, as written out."""
    case = _Case([[70]], 4, 2, 32)
    expected = [x.detach() for x in case.native()]
    case.given = case.given + 5
    for x, y in zip(case.native(), expected, strict=True):
        assert torch.equal(x, y)
    torch.stack([x.float().sum() for x in case.native()]).sum().backward()
    assert bool(case.packed.grad.isfinite().all())


@pytest.mark.parametrize("dim", [48, 100, 16])
def test_head_sizes_without_a_kernel(dim):
    assert not has_kernel(normal(0, 1), dim, (2, 2))


@pytest.mark.parametrize("taps", [(3, 2), (2, 1), (4, 4)])
def test_convolutions_without_a_kernel(taps):
    assert not has_kernel(normal(0, 1), 32, taps)


@pytest.mark.parametrize("size", [0.0, 8e-9])
def test_vectors_below_the_floor_of_lengths(size):
    """Oracle: double precision. Zero gives zero, and there the length depends on nothing."""
    case = _Case([[70]], 4, 2, 32, packed=False)
    with torch.no_grad():
        case.packed[:, 30:40] *= size
        for bias in case.parameters[1::2]:
            bias.zero_()
    precise = [exact(x) for x in (case.packed, *case.parameters)]
    results, expected = case.native(), case.reference(*precise)
    assert bool(results[0][:, :, 32:40].any()) == (size > 0)
    for a, b in zip(results, expected, strict=True):
        check(a, b)
    torch.stack([x.float().sum() for x in results]).sum().backward()
    torch.stack([x.sum() for x in expected]).sum().backward()
    for x in (case.packed, *case.parameters):
        assert bool(x.grad.isfinite().all())
    assert relative_error(case.packed.grad.double(), precise[0].grad) < ROUNDING


def test_inputs_that_are_not_contiguous():
    results = []
    for apart in (False, True):
        case = _Case([[70], [70]], 4, 2, 32)
        leaves = [case.packed, *case.parameters]
        if apart:
            case.packed, *case.parameters = (torch.stack([x, -x], dim=-1)[..., 0] for x in leaves)
            case.angles = tuple(torch.stack([x, -x], dim=-1)[..., 0] for x in case.angles)
            case.given = torch.stack([case.given, case.given], -1)[..., 0]
        outputs = case.native()
        torch.stack([x.float().square().sum() + x.float().sum() for x in outputs]).sum().backward()
        results.append([*outputs, *(x.grad for x in leaves)])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_parameters_in_low_precision():
    """A whole model cast to bf16 must not have its numbers read as fp32."""
    case = _Case([[70]], 4, 2, 32)
    case.parameters = [x.detach().bfloat16().requires_grad_() for x in case.parameters]
    case.compare()


def test_no_parameter_needs_a_gradient():
    """As with adapters on the projections alone."""
    grads = []
    for frozen in (False, True):
        case = _Case([[70]], 4, 2, 32)
        if frozen:
            case.parameters = [x.detach() for x in case.parameters]
        torch.stack([x.float().sum() for x in case.native()]).sum().backward()
        grads.append(case.packed.grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients(context):
    case = _Case([[70]], 4, 2, 32)
    expected = case.native()
    with context():
        for x, y in zip(case.native(), expected, strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("which", range(6))
def test_numbers_that_are_not_finite_come_out(which, value):
    case = _Case([[70]], 4, 2, 32)
    with torch.no_grad():
        (case.packed, *case.parameters)[which].view(-1)[0] = value
    assert not all(bool(x.isfinite().all()) for x in case.native())
