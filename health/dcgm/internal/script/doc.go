// Package script tells the scripted libdcgm.so.4 of health/dcgm/testdata what to answer. Only tests use
// it; it is a package because a test file cannot use cgo.
package script
