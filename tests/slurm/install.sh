#!/usr/bin/env bash
# Slurm from the system's own packages, for the tests beside this file. Where it cannot be installed the tests say so and are skipped.
set -euo pipefail
missing=()
for pair in slurmctld:slurmctld slurmd:slurmd munged:munge sbatch:slurm-client; do
    command -v "${pair%%:*}" >/dev/null || missing+=("${pair##*:}")
done
[ "${#missing[@]}" -gt 0 ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "tests/slurm/install.sh: ${missing[*]}: not installed, and only root on a Debian-like system can install them: tests are skipped" >&2
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
skip() {
    echo "tests/slurm/install.sh: ${missing[*]}: apt-get cannot install them here: tests are skipped" >&2
    exit 0
}
apt-get -qq update || skip
# The packages would start services of their own: 101 says no.
policy=/usr/sbin/policy-rc.d
if [ ! -e $policy ]; then
    printf '#!/bin/sh\nexit 101\n' >$policy
    chmod +x $policy
    trap 'rm -f $policy' EXIT
fi
apt-get -qq install -y --no-install-recommends "${missing[@]}" >/dev/null || skip
