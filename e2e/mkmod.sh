#!/bin/sh
# Rewrites go.mod and go.sum for a release of Kubernetes: KUBERNETES=v1.37.0 ./mkmod.sh
#
# k8s.io/kubernetes requires its staging modules at v0.0.0 and replaces them with directories of its repository. Go applies
# only the main module's replacements, so each module needs one here, at its published version.
set -eu
cd "$(dirname "$0")"
version=${KUBERNETES:-v1.36.3}
staging=v0.${version#v1.}

rm -f go.mod go.sum
go mod init github.com/gpu-node-agent/gpu-node-agent/e2e
go mod edit -go=1.26.0 -require="k8s.io/kubernetes@$version"
gomod=$(go mod download -json "k8s.io/kubernetes@$version" | sed -n 's/.*"GoMod": "\(.*\)".*/\1/p')
for module in $(sed -n 's#^\t\(k8s.io/[a-z-]*\) => ./staging/.*#\1#p' "$gomod"); do
	go mod edit -replace="$module=$module@$staging"
done
go mod tidy
