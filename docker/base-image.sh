#!/bin/bash
# Makes a base image from Debian's packages alone, for machines without access to a registry. Needs root, debootstrap and docker.
#   docker/base-image.sh rookery-base [package ...]
# Then: make images BASE_IMAGE=rookery-base. MIRROR names another Debian mirror, SUITE a release with Python 3.11 to 3.14.
set -euo pipefail
image=${1:?"usage: $0 IMAGE [package ...]"}
shift
packages=$(IFS=,; echo "ca-certificates,python3,python3-venv${*:+,$*}")
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
debootstrap --variant=minbase --include="$packages" "${SUITE:-bookworm}" "$root" "${MIRROR:-http://deb.debian.org/debian}"
rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/* "$root"/usr/share/doc/* "$root"/usr/share/man/*
tar --create --directory "$root" . | docker import --change 'ENV LANG=C.UTF-8' - "$image"
