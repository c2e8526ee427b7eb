"""`openzaya data verify`: are shards what they were when they were built?"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from openzaya.cli.units import decimal

HELP = "compare every file of a folder of shards with its digest"

_EPILOG = """\
examples:
  openzaya data verify shards            SHA-256 of every file
  openzaya data verify shards --quick    CRC-32, about three times as fast

exit code: 0 when all is well, 1 when a file is damaged, 2 when the folder cannot be used
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="what `data build` made")
    parser.add_argument("--quick", action="store_true", help="compare CRC-32 alone")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def run(args: argparse.Namespace) -> int:
    """Run the verb."""
    from openzaya.cli.progress import bytes_progress
    from openzaya.data.shards import DamagedManifest, read_manifest, verify

    size, files, began = 0, 0, time.monotonic()
    try:
        manifest = read_manifest(args.folder)
    except DamagedManifest as error:
        problems = [str(error)]
    else:
        known = [record for _, record in manifest.files()]
        files, size = len(known), sum(record.bytes for record in known)
        with bytes_progress("reading", size) as progress:
            problems = verify(args.folder, manifest, args.quick, progress)
    seconds = time.monotonic() - began
    if args.json:
        fields = {"folder": str(args.folder), "files": files, "bytes": size, "damaged": problems}
        print(json.dumps({**fields, "seconds": round(seconds, 2)}, indent=2))
    else:
        for problem in problems:
            print(problem)
        state = f"{len(problems)} damaged" if problems else "all as they were built"
        print(f"{args.folder}: {files:,} files, {decimal(size)}, {seconds:.1f} s: {state}")
    return 1 if problems else 0
