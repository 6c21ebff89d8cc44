// Package script controls the scripted libdcgm.so.4 of health/dcgm/testdata. Only tests use it; it is a package because
// test files cannot use cgo.
package script
