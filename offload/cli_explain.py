"""`offload explain`: one pair, its geometry, its verdict and what else there is."""

from __future__ import annotations

import argparse
import sys

from offload.arguments import positive
from offload.cli import COMMANDS, REJECTED, Subparsers
from offload.core.geometry import Component
from offload.core.kinds import AUTO, Direction, IoBackend, Layout, PoolKind, parse
from offload.verdict import DEVICES, NOMINAL, Verdict, explain_parts


def add_parser(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser("explain", help=COMMANDS["explain"][1])
    parser.add_argument("--kind", required=True, metavar="K", help=", ".join(PoolKind))
    parser.add_argument("--layout", required=True, metavar="L", help=", ".join(Layout))
    backends = ", ".join([*IoBackend, AUTO])
    parser.add_argument("--io-backend", default=AUTO, metavar="B", help=backends)
    parser.add_argument("--direction", default="load", metavar="D", help=", ".join(Direction))
    parser.add_argument(
        "--device", metavar="D", help=f"count only what runs there: {', '.join(DEVICES)}"
    )
    sizes = parser.add_argument_group("sizes")
    sizes.add_argument("--tokens", type=int, default=64, help="tokens in a page (64)")
    sizes.add_argument("--heads", type=int, default=8, help="mha: kv heads (8)")
    sizes.add_argument("--dim", type=int, help="mha: head dim (128); mla: latent dim (576)")
    sizes.add_argument("--v-dim", type=int, help="mha: head dim of v, 0 for none (as --dim)")
    sizes.add_argument("--rope-dim", type=int, default=64, help="mla: its rope part (64)")
    sizes.add_argument("--itemsize", type=int, default=2, help="bytes of one element (2)")
    sizes.add_argument("--row-bytes", type=int, help="rows, state: bytes of a row (37440)")
    sizes.add_argument("--layers", type=int, default=32, help="layers (32)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the verdict: to stdout, or as one paragraph on stderr when it is a rejection."""
    kind = parse(PoolKind, arguments.kind)
    verdict = explain_parts(
        kind,
        parts(kind, arguments),
        num_layers=arguments.layers,
        layout=arguments.layout,
        io_backend=arguments.io_backend,
        direction=arguments.direction,
        device=arguments.device,
    )
    if not verdict.supported:
        print(verdict.text, file=sys.stderr)
        return REJECTED
    print("\n".join(lines(verdict)))
    return 0


def lines(verdict: Verdict) -> list[str]:
    """Return a supported pair as text."""
    whole = "one contiguous range" if verdict.whole_page else "in pieces, one per layer or more"
    return [
        verdict.text,
        "",
        f"  runs          {verdict.runs} x {verdict.run_bytes} bytes in one layer of one page",
        f"  whole page    {whole}",
        f"  io backends   {', '.join(verdict.io_backends)}",
        f"  layouts       {', '.join(verdict.layouts)}",
    ]


def parts(kind: PoolKind, arguments: argparse.Namespace) -> tuple[Component, ...]:
    """Return the components of the sizes that were given."""
    tokens, item, row = arguments.tokens, arguments.itemsize, arguments.row_bytes
    asked = f"kind {kind.value!r}"
    positive(asked, tokens=tokens, itemsize=item, layers=arguments.layers)
    # 1 keys and values, 2 a latent row, 3 opaque rows of a given size, 4 opaque rows of the nominal size.
    if kind is PoolKind.MHA:
        dim = 128 if arguments.dim is None else arguments.dim
        positive(asked, heads=arguments.heads, dim=dim)
        v_dim = dim if arguments.v_dim is None else arguments.v_dim
        positive(asked, v_dim=v_dim or 1)
        dims = {"k": dim, "v": v_dim} if v_dim else {"k": dim}
        return tuple(Component(n, tokens, arguments.heads, d, item) for n, d in dims.items())
    if kind is PoolKind.MLA:
        dim, rope = 576 if arguments.dim is None else arguments.dim, arguments.rope_dim
        positive(asked, dim=dim, latent_without_rope=dim - rope, rope_dim=rope or 1)
        split = (("latent", dim - rope), ("rope", rope)) if rope else ()
        return (Component("kv", tokens, 1, dim, item, split),)
    if row is not None:
        positive(asked, row_bytes=row)
        return (Component("row", 1, 1, row, 1),)
    return NOMINAL[kind]
