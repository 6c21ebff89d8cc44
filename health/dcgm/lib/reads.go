//go:build cgo && linux

package lib

// #include <stdlib.h>
// #include "symbols.h"
import "C"

import (
	"errors"
	"unsafe"
)

// Peer is another GPU, and the path to it with the bits of dcgm_structs.h, DCGM_TOPOLOGY_.
type Peer struct {
	GPU  uint
	Path uint64
}

// Peers returns the peers of a GPU. go-dcgm's function also reads from the driver (../OBSERVED.md#live-peers).
func Peers(gpu uint) ([]Peer, error) {
	var peers [C.GNA_PEERS]C.gna_peer_t
	var count C.unsigned
	if result := C.gna_read_peers(C.unsigned(gpu), &peers[0], &count); result != 0 {
		return nil, errors.New(ErrorText(int(result)))
	}
	all := make([]Peer, count)
	for i, p := range peers[:count] {
		all[i] = Peer{uint(p.gpu), uint64(p.path)}
	}
	return all, nil
}

// Row is a sample of field 230 of an entity (dcgm_structs.h: dcgmFieldValue_v1).
type Row struct {
	Kind, ID     uint
	Type, Status int
	At, Value    int64 // At is in microseconds since 1970 by the engine's clock
}

// Rows passes the samples of a group of entities since a time to add. go-dcgm allocates 4 KiB for each of them, and a mebibyte for none.
func Rows(group, fields uintptr, since int64, add func(Row)) error {
	var rows *C.gna_row_t
	var count C.unsigned
	result := C.gna_read_rows(C.uintptr_t(group), C.uintptr_t(fields), C.longlong(since), &rows, &count)
	defer C.free(unsafe.Pointer(rows))
	if result != 0 {
		return errors.New(ErrorText(int(result)))
	}
	for _, r := range unsafe.Slice(rows, count) {
		add(Row{uint(r.kind), uint(r.id), int(r._type), int(r.status), int64(r.at), int64(r.value)})
	}
	return nil
}
