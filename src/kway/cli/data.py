"""``kway data``: which data sets there are, and download those that are read from files."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

HELP = "list data sets; download one, checked and resumable"
WHATS = ("list", "fetch")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    from kway.data.sources import names

    parser.add_argument(
        "what",
        metavar="WHAT",
        help="list: which sets there are, and where; fetch: download those that are named",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names())}")
    parser.add_argument(
        "--data-dir",
        type=Path,
        metavar="DIR",
        help="root with one folder a data set (default: KWAY_DATA, else data in kway's cache folder)",
    )


def run(args: argparse.Namespace) -> int:
    """List or download; returns 0. Raises ``UsageError``, and ``KwayError`` where no address gives a set."""
    from kway.cli._job import data_root
    from kway.data.originals import original_of
    from kway.errors import UsageError
    from kway.registry import known

    known("kway data", args.what, dict.fromkeys(WHATS, ""))
    root = data_root(args.data_dir)
    if args.what == "list":
        if args.names:
            raise UsageError(f"kway data list {args.names[0]}", "it lists all sets", "leave the name out")
        print("\n".join(_lines(root)))
        return 0
    if not args.names:
        raise UsageError("kway data fetch without a name", "which set?", "see kway data list")
    for name in args.names:  # all are known before the first is begun
        original_of(name)
    for name in args.names:
        _fetch(name, root)
    return 0


def _fetch(name: str, root: Path) -> None:
    from kway.data.fetching import fetch
    from kway.data.sources import load
    from kway.devices.terminal import redraws
    from kway.errors import DataError
    from kway.report.transfer import Transfer

    shown = Transfer(sys.stdout, live=redraws(sys.stdout))
    try:
        is_new = fetch(name, root, shown)
    except BaseException as ending:
        if not isinstance(ending, Exception):
            ending.add_note("what was downloaded stays, and the same command goes on with it")
        raise
    finally:
        shown.close()
    try:
        source = load(name, root)
    except DataError as error:
        do = f"remove {root / name} and fetch it again"
        raise DataError(error.got, error.need, do) from None
    counts = f"{len(source.train):,} to train on, {len(source.validation):,} held out"
    print(f"{name:10} {'' if is_new else 'was there: '}{root / name}: {counts}")


def _lines(root: Path) -> Iterator[str]:
    from kway.cli.devices import table
    from kway.data.originals import originals
    from kway.data.sources import names
    from kway.units import bytes_text

    found = originals()
    rows = []
    for name in names():
        if name not in found:
            rows.append([name, "made here, or comes with a package", ""])
        elif (root / name).is_dir():
            rows.append([name, str(root / name), ""])
        else:
            rows.append([name, f"not in {root}", f"kway data fetch {name}, {bytes_text(found[name].size)}"])
    yield from table(["name", "where", ""], rows)
