#!/usr/bin/env bash
# Installs Debian's package of Chromium in the version below, or the newest one if that is gone. On another system, or without the rights, any Chromium in
# the PATH will do.
set -euo pipefail
version=150.0.7871.100-1~deb12u1

if [ "$(dpkg-query -W -f '${db:Status-Status} ${Version}' chromium 2>/dev/null)" = "installed $version" ]; then exit 0; fi
install() { DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends --allow-downgrades "$@"; }
if [ "$(id -u)" = 0 ] && grep -qs '^VERSION_CODENAME=bookworm$' /etc/os-release; then
	apt-get update
	install chromium="$version" chromium-common="$version" || { # a point release of Debian drops it
		echo "Debian has no chromium $version any more: correct the version in e2e/page/need.sh; using the newest" >&2
		install chromium
	}
elif command -v chromium >/dev/null; then
	echo "using $(chromium --version) instead of $version"
else
	echo "chromium is missing: install Chromium 130 or later" >&2
	exit 1
fi
