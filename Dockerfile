# The agent's images: make image builds the one with DCGM, for nodes with GPUs; make image-sim builds the one for simulated
# GPUs only, under 30 MB. Both copy the licences that make licenses writes to bin. The Go code is cross-compiled; only the
# last stages with DCGM run programs of the target architecture.
#
# The base images are pinned by the digest of their architecture list. To update one, change this file.
ARG GO_IMAGE=docker.io/library/golang:1.26.8-bookworm@sha256:9fdc884aacc3bec89b20ffc69f4bb369c78210e3e4f600387b5128b12c199f81
# The same Debian release as GO_IMAGE, because the agent is linked with its C library.
ARG BASE_IMAGE=docker.io/library/debian:bookworm-20260824-slim@sha256:88200866dfff7ea7f5cbcb6ec7c8a701889efe6fe859fe64d6990e4b07ea4171
ARG SIM_IMAGE=gcr.io/distroless/static-debian12@sha256:20bc6c0bc4d625a22a8fde3e55f6515709b32055ef8fb9cfbddaa06d1760f838

FROM --platform=${BUILDPLATFORM} ${GO_IMAGE} AS source
WORKDIR /src
ENV GOTOOLCHAIN=local GOFLAGS='-trimpath -buildvcs=false'
COPY go.mod go.sum ./
RUN --mount=type=cache,target=/go/pkg/mod go mod download
COPY . .

# Without cgo everything except DCGM and NVML works. Each stage repeats the arguments, because some builders do not inherit them.
FROM source AS build-sim
ARG VERSION=dev
ARG REVISION=
ARG TARGETOS
ARG TARGETARCH
RUN --mount=type=cache,target=/go/pkg/mod --mount=type=cache,target=/root/.cache/go-build \
    CGO_ENABLED=0 GOOS=${TARGETOS} GOARCH=${TARGETARCH} \
    go build -ldflags "-s -w -X main.version=${VERSION} -X main.revision=${REVISION}" -o /out/gpu-node-agent .

# With the flags of the Makefile, so that both build the same.
FROM source AS build
ARG VERSION=dev
ARG REVISION=
ARG TARGETOS
ARG TARGETARCH
RUN --mount=type=cache,target=/go/pkg/mod --mount=type=cache,target=/root/.cache/go-build \
    set -eu; host=$(go env GOHOSTARCH); \
    case "${TARGETARCH:-$host}" in \
      "$host") ;; \
      amd64) export CC=x86_64-linux-gnu-gcc; packages="gcc-x86-64-linux-gnu libc6-dev-amd64-cross" ;; \
      arm64) export CC=aarch64-linux-gnu-gcc; packages="gcc-aarch64-linux-gnu libc6-dev-arm64-cross" ;; \
      *) echo "NVIDIA has no DCGM for ${TARGETARCH}" >&2; exit 1 ;; \
    esac; \
    if [ -n "${packages:-}" ]; then apt-get update; apt-get install -y --no-install-recommends $packages; fi; \
    CGO_ENABLED=1 CGO_CFLAGS='-g -O2 -Wno-deprecated-declarations' GOOS=${TARGETOS} GOARCH=${TARGETARCH} \
    go build -ldflags "-s -w -X main.version=${VERSION} -X main.revision=${REVISION}" -o /out/gpu-node-agent .

FROM ${SIM_IMAGE} AS sim
ARG VERSION=dev
ARG REVISION=
LABEL org.opencontainers.image.title="gpu-node-agent (simulated GPUs)" \
      org.opencontainers.image.description="Device plugin, Prometheus exporter and health monitor of NVIDIA GPUs; this image has no DCGM" \
      org.opencontainers.image.source="https://github.com/gpu-node-agent/gpu-node-agent" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY LICENSE bin/third-party-licenses.txt /licenses/
COPY --from=build-sim /out/gpu-node-agent /usr/local/bin/gpu-node-agent
# The kubelet's socket directory belongs to root.
USER 0:0
EXPOSE 9400
ENTRYPOINT ["/usr/local/bin/gpu-node-agent"]

FROM ${BASE_IMAGE} AS dcgm
# The key ring package contains NVIDIA's key and package source. The ARM source is the one of Ubuntu 22.04, whose C library
# is older than this Debian's. go-dcgm loads libdcgm.so.4. The package proprietary contains the module for the profiling
# fields; as in NVIDIA's image of dcgm-exporter, the library that the module needs gets a second name. From 4.7 on the package
# core has no files, and each module has a package. The image contains libraries only: no host engine, no diagnostics.
# health.kubernetes.kubeconfig needs the root certificates.
ARG DCGM_VERSION=1:4.6.1-1
ENV DEBIAN_FRONTEND=noninteractive
RUN set -eu; arch=$(dpkg --print-architecture); \
    case "$arch" in \
      amd64) repository=debian12/x86_64 ;; \
      arm64) repository=ubuntu2204/sbsa ;; \
      *) echo "NVIDIA has no DCGM for $arch" >&2; exit 1 ;; \
    esac; \
    apt-get update; \
    apt-get install -y --no-install-recommends ca-certificates curl; \
    curl -fsSL --retry 3 -o /tmp/keyring.deb \
      "https://developer.download.nvidia.com/compute/cuda/repos/${repository}/cuda-keyring_1.1-1_all.deb"; \
    dpkg -i /tmp/keyring.deb; \
    apt-get update; \
    packages="datacenter-gpu-manager-4-core=${DCGM_VERSION} datacenter-gpu-manager-4-proprietary=${DCGM_VERSION}"; \
    for package in libdcgm datacenter-gpu-manager-4-module-health datacenter-gpu-manager-4-module-introspect \
        datacenter-gpu-manager-4-module-nvswitch datacenter-gpu-manager-4-module-policy datacenter-gpu-manager-4-module-sysmon; do \
      if apt-cache madison "$package" | grep -qF " ${DCGM_VERSION} |"; then packages="$packages $package=${DCGM_VERSION}"; fi; \
    done; \
    apt-get install -y --no-install-recommends $packages; \
    mkdir -p /out/usr/lib /out/etc/ssl/certs /out/licenses; \
    find /usr/lib \( -name 'libdcgm*.so*' -o -name 'libnvperf*.so*' \) -exec cp -a {} /out/usr/lib/ \; ; \
    test -e /out/usr/lib/libnvperf_host.so || ln -s libnvperf_dcgm_host.so /out/usr/lib/libnvperf_host.so; \
    cp /etc/ssl/certs/ca-certificates.crt /out/etc/ssl/certs/; \
    for licence in /usr/share/doc/datacenter-gpu-manager-4-*/copyright /usr/share/doc/libdcgm/copyright \
        /usr/share/doc/ca-certificates/copyright; do \
      if [ -e "$licence" ]; then cp "$licence" "/out/licenses/$(basename "$(dirname "$licence")").txt"; fi; \
    done

FROM ${BASE_IMAGE}
ARG VERSION=dev
ARG REVISION=
LABEL org.opencontainers.image.title="gpu-node-agent" \
      org.opencontainers.image.description="Device plugin, Prometheus exporter and health monitor of NVIDIA GPUs, with DCGM 4" \
      org.opencontainers.image.source="https://github.com/gpu-node-agent/gpu-node-agent" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=dcgm /out/ /
COPY LICENSE bin/third-party-licenses.txt /licenses/
COPY --from=build /out/gpu-node-agent /usr/local/bin/gpu-node-agent
# Checks here, instead of on a node, that the libraries exist and load. They are in the loader's default path. The names are
# FILE=PACKAGE since DCGM 4.7; before, the package is proprietary or core.
RUN set -eu; \
    for library in libdcgm.so.4=libdcgm libdcgmmoduleprofiling.so.4=datacenter-gpu-manager-4-proprietary \
        libnvperf_host.so=datacenter-gpu-manager-4-proprietary libdcgmmodulehealth.so.4=datacenter-gpu-manager-4-module-health \
        libdcgmmoduleintrospect.so.4=datacenter-gpu-manager-4-module-introspect \
        libdcgmmodulenvswitch.so.4=datacenter-gpu-manager-4-module-nvswitch \
        libdcgmmodulepolicy.so.4=datacenter-gpu-manager-4-module-policy \
        libdcgmmodulesysmon.so.4=datacenter-gpu-manager-4-module-sysmon; do \
      if [ ! -e "/usr/lib/${library%%=*}" ]; then \
        echo "DCGM: no /usr/lib/${library%%=*}, expected it from ${library#*=} (before DCGM 4.7 from" \
          "datacenter-gpu-manager-4-core or -proprietary); choose another DCGM_VERSION" >&2; \
        exit 1; \
      fi; \
    done; \
    for library in libdcgm libdcgmmodulehealth libdcgmmodulepolicy; do \
      if ldd "/usr/lib/$library.so.4" | grep 'not found'; then exit 1; fi; \
    done; \
    /usr/local/bin/gpu-node-agent version
# For NVIDIA's container runtime. The driver requirement is off, because DCGM itself reports an unsupported driver.
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    NVIDIA_DISABLE_REQUIRE=true
# The kubelet's socket directory belongs to root. The chart drops every other privilege.
USER 0:0
EXPOSE 9400
ENTRYPOINT ["/usr/local/bin/gpu-node-agent"]
