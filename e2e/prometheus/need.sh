#!/usr/bin/env bash
# Makes prometheus and promtool available: unless they are installed, Debian's package is unpacked below bin/.
# Not installed, so that no service starts and nothing of the system changes.
set -euo pipefail
cd "$(dirname "$0")/../.."

if command -v prometheus >/dev/null && command -v promtool >/dev/null; then exit 0; fi
dir=$PWD/bin/prometheus
if [ -x "$dir/usr/bin/prometheus" ] && [ -x "$dir/usr/bin/promtool" ]; then exit 0; fi
if ! command -v apt-get >/dev/null; then
	echo "prometheus and promtool are missing, and there is no apt-get: install Prometheus 2.42 or later" >&2
	exit 1
fi
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
# Without this option root's apt warns that its own user cannot write to the directory.
fetch() { (cd "$tmp" && apt-get -o APT::Sandbox::User=root download prometheus); }
if ! fetch; then # no lists of packages yet, or old ones
	apt-get update
	fetch
fi
rm -rf "$dir"
mkdir -p "$dir"
dpkg-deb -x "$tmp"/prometheus_*.deb "$dir"
"$dir/usr/bin/promtool" --version
