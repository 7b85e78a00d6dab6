"""`megarl doctor`: what is installed, what this machine can run, what is missing and the command that gets it, what does not fit."""

from __future__ import annotations

from megarl import __version__
from megarl.parallel.machine import GIB, PACKAGES, abilities, look


def doctor() -> int:
    """Prints it; 0 where at least the demo runs."""
    machine = look()
    python = ".".join(map(str, machine.python))
    print(f"megarl {__version__}, Python {python}, {machine.system}, {machine.cores} cores, {machine.memory / GIB:.0f} GiB of memory")
    if machine.driver or machine.cuda:
        print(f"driver     {machine.driver or 'none'}, torch for CUDA {machine.cuda or 'none'}")
    print("installed  " + ", ".join(f"{name} {machine.versions[name]}" for name in PACKAGES if name in machine.versions))
    print()
    found = list(abilities(machine))
    for ability in found:
        note = f": {ability.note}" if ability.note else ""
        print(f"{'yes' if ability.ready else 'no ':4s} {ability.name}{note}")
        if ability.command:
            print(f"       {ability.command}")
    for flaw in machine.flaws:
        print(f"look {flaw}")
    return 0 if found[0].ready else 1
