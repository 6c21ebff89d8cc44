#!/usr/bin/env bash
# Unpacks Debian's package of Prometheus below bin/ unless prometheus and promtool are installed. It does not install the
# package, so that no service starts and the system stays unchanged.
set -euo pipefail
cd "$(dirname "$0")/../.."

if command -v prometheus >/dev/null && command -v promtool >/dev/null; then exit 0; fi
dir=$PWD/bin/prometheus
if [ -x "$dir/usr/bin/prometheus" ] && [ -x "$dir/usr/bin/promtool" ]; then exit 0; fi
if ! command -v apt-get >/dev/null; then
	echo "prometheus and promtool are missing: install Prometheus 2.42 or later" >&2
	exit 1
fi
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
# Without this option apt as root warns that its sandbox user cannot write to the directory.
fetch() { (cd "$tmp" && apt-get -o APT::Sandbox::User=root download prometheus); }
if ! fetch; then # missing or old package lists
	apt-get update
	fetch
fi
rm -rf "$dir"
mkdir -p "$dir"
dpkg-deb -x "$tmp"/prometheus_*.deb "$dir"
"$dir/usr/bin/promtool" --version
