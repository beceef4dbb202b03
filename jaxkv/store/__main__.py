"""``python -m jaxkv.store``: look at a store's folder, check it, tidy it."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from jaxkv import cli
from jaxkv.store.admin import Admin, Item

DAMAGED = 1
_FEWEST_DIGITS = 8


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxkv.store",
        description="Look at the folder of a KV store, check it and tidy it, also while processes use it.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text.capitalize() + ".", allow_abbrev=False)
        added.add_argument("folder", help="the path that was given to Store")
        return added

    command("ls", "list the files, one a line")
    command("stat", "say how many files and bytes there are, and of what")
    added = command("verify", f"read every file and check it; exit {DAMAGED} if one is damaged")
    added.add_argument("--remove", action="store_true", help="remove the damaged ones")
    added = command("gc", "remove what writers that died have left behind")
    added.add_argument("--disk", metavar="SIZE", help="and the least recently used files beyond this size, e.g. 10G")
    added = command("rm", "remove files by key, by fingerprint, or all of them")
    added.add_argument("key", nargs="*", metavar="KEY", help=f"the key, or its first {_FEWEST_DIGITS} digits or more")
    added.add_argument("--fingerprint", metavar="DIGITS", help="all files of one model, dtype and salt")
    added.add_argument("--all", action="store_true", help="all files")
    for added in commands.choices.values():
        added.add_argument("--json", action="store_true", help="JSON on stdout: an object a file, or one report")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    args = parser().parse_args(argv)
    run = {"ls": _ls, "stat": _stat, "verify": _verify, "gc": _gc, "rm": _rm}[args.command]
    return cli.run(lambda: run(args))


def _ls(args: argparse.Namespace) -> None:
    with Admin(args.folder) as admin:
        for item in admin.items():
            print(json.dumps(item.to_json()) if args.json else _line(item))


def _stat(args: argparse.Namespace) -> None:
    spaces: Counter[str] = Counter()
    fingerprints: dict[str, Counter[str]] = {}
    files = nbytes = damaged = 0
    with Admin(args.folder) as admin:
        for item in admin.items():
            files, nbytes, damaged = files + 1, nbytes + item.nbytes, damaged + (item.damage is not None)
            if item.header is not None:
                key = item.header.key
                spaces[key.space] += key.tokens
                of_root = fingerprints.setdefault(key.root.hex(), Counter())
                of_root.update(files=1, bytes=item.nbytes, tokens=key.tokens)
        foreign = admin.foreign()
    report = {
        "folder": args.folder,
        "files": files,
        "bytes": nbytes,
        "content_tokens": spaces["content"],
        "prefix_tokens": spaces["prefix"],
        "damaged_headers": damaged,
        "foreign": foreign,
        "fingerprints": fingerprints,
    }
    if args.json:
        print(json.dumps(report))
        return
    print(f"{files} files, {_size(nbytes)}; {damaged} with a damaged header, {foreign} foreign things")
    print(f"{spaces['content']} tokens in segments, {spaces['prefix']} in blocks of prefixes")
    for root, sums in fingerprints.items():
        print(f"fingerprint {root[:16]}: {sums['files']} files, {_size(sums['bytes'])}, {sums['tokens']} tokens")


def _verify(args: argparse.Namespace) -> int:
    files = damaged = 0
    with Admin(args.folder) as admin:
        for item in admin.verify(remove=args.remove):
            files, damaged = files + 1, damaged + (item.damage is not None)
            if item.damage is not None and not args.json:
                print(f"{item.name}  {item.damage}", flush=True)
    removed = damaged if args.remove else 0
    report = {"folder": args.folder, "files": files, "damaged": damaged, "removed": removed}
    print(json.dumps(report) if args.json else f"{files} files, {damaged} damaged, {removed} removed")
    return DAMAGED if damaged else 0


def _gc(args: argparse.Namespace) -> None:
    cap = None
    if args.disk is not None:
        # Only here: it imports JAX, which the rest does without.
        from jaxkv.sizing import parse_bytes

        cap = parse_bytes(args.disk)
    with Admin(args.folder) as admin:
        done = admin.gc(cap)
    report: dict[str, Any] = {"folder": args.folder, **dataclasses.asdict(done)}
    text = f"removed {done.parts} unfinished parts and {done.files} files, {_size(done.evicted_bytes)}"
    print(json.dumps(report) if args.json else f"{text}; {_size(done.bytes)} left")


def _rm(args: argparse.Namespace) -> None:
    ways = bool(args.key) + args.all + (args.fingerprint is not None)
    if ways != 1:
        raise ValueError("say what to remove: KEY ..., --fingerprint DIGITS or --all, and one of them")
    for digits in (*args.key, *([args.fingerprint] if args.fingerprint is not None else [])):
        if re.fullmatch(rf"[0-9a-f]{{{_FEWEST_DIGITS},64}}", digits) is None:
            raise ValueError(f"{digits!r} is no key: give {_FEWEST_DIGITS} to 64 hexadecimal digits, as ls shows them")
    with Admin(args.folder) as admin:
        names = set(admin.names()) if args.all else set()
        for digits in args.key:
            names |= _only(digits, admin.names(digits))
        if args.fingerprint is not None:
            found = [item for item in admin.items() if item.header is not None]
            names = {item.name for item in found if _root(item).startswith(args.fingerprint)}
            _only(args.fingerprint, {_root(item) for item in found if _root(item).startswith(args.fingerprint)})
        nbytes = admin.remove(names)
    report = {"folder": args.folder, "files": len(names), "bytes": nbytes}
    print(json.dumps(report) if args.json else f"removed {len(names)} files, {_size(nbytes)}")


def _only(digits: str, found: Any) -> set[str]:
    if len(found) != 1:
        raise ValueError(f"{digits} is the beginning of {len(found)} keys in the folder; give digits of just one")
    return set(found)


def _root(item: Item) -> str:
    assert item.header is not None
    return item.header.key.root.hex()


def _line(item: Item) -> str:
    used = datetime.datetime.fromtimestamp(item.used).isoformat(" ", "seconds")
    if item.header is None:
        return f"{item.name}  {_size(item.nbytes):>10}  {used}  damaged: {item.damage}"
    key = item.header.key
    arrays = " ".join(f"{name} {dtype} {list(shape)}" for name, dtype, shape in item.header.layout.arrays)
    return f"{key.name}  {_size(item.nbytes):>10}  {used}  {key.space:<7} {key.tokens:>6} tokens  {arrays}"


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or unit == "GiB":
            break
        nbytes /= 1024
    return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"


if __name__ == "__main__":
    sys.exit(main())
