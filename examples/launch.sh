#!/usr/bin/env bash
# A run as a job of SkyPilot and as one of Kubeflow. --dryrun prints each job and submits nothing.
# Kubeflow needs a KUBECONFIG, from which it takes the address of the cluster.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=.

launch() {
  "${PYTHON:-.venv-clouds/bin/python}" tools/launch.py configs/vapo_32b.yaml run_dir=/runs/vapo \
    --nodes 16 --image registry/megarl --volume megarl:/runs --dryrun "$@"
}

launch --executor skypilot --infra k8s --gpu-type H100
launch --executor kubeflow --namespace team
