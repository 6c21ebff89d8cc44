#!/usr/bin/env bash
# Installs strace unless it is installed.
set -euo pipefail

command -v strace >/dev/null && exit
if ! command -v apt-get >/dev/null; then
	echo "strace is missing: install it" >&2
	exit 1
fi
apt-get update
DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends strace
