#!/bin/sh
# Rewrites the module files for two releases of Kubernetes, after a change of the versions below: ./mkmod.sh
#
# go.mod has the release that the tests run by default. go.kubelet1.37.mod has the other one, for
# go test -modfile=go.kubelet1.37.mod -tags=kubelet1.37
#
# k8s.io/kubernetes requires its staging modules at v0.0.0 and replaces them with directories of its repository. Go applies
# only the main module's replacements, so each module needs one here, at its published version.
set -eu
cd "$(dirname "$0")"

# write FILE VERSION
write() {
	rm -f "$1" "${1%.mod}.sum"
	echo module github.com/gpu-node-agent/gpu-node-agent/e2e >"$1"
	go mod edit -go=1.26.8 -require="k8s.io/kubernetes@$2" "$1"
	gomod=$(go mod download -json "k8s.io/kubernetes@$2" | sed -n 's/.*"GoMod": "\(.*\)".*/\1/p')
	for module in $(sed -n 's#^\t\(k8s.io/[a-z-]*\) => ./staging/.*#\1#p' "$gomod"); do
		go mod edit -replace="$module=$module@v0.${2#v1.}" "$1"
	done
	go mod tidy -modfile="$1"
}

write go.mod v1.36.5
write go.kubelet1.37.mod v1.37.2
