// Package formerhealth is package health from before verdicts became a view and XIDs a ledger. Tests of health compare with it; nothing
// else may use it.
package formerhealth
