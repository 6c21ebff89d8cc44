//go:build cgo && linux

package cdi

import "C" // compiles symbols.c
