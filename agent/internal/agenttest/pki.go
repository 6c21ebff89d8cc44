package agenttest

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"path/filepath"
	"testing"
	"time"
)

// Authority issues certificates into a directory, valid for an hour. Its own is ca.crt.
type Authority struct {
	dir    string
	cert   *x509.Certificate
	key    crypto.Signer
	serial int64
}

// NewAuthority returns an authority that writes into a directory.
func NewAuthority(t *testing.T, dir string) *Authority {
	t.Helper()
	a := &Authority{dir: dir}
	a.Issue(t, "ca", "authority")
	return a
}

// Issue writes NAME.crt and NAME.key.
func (a *Authority) Issue(t *testing.T, name, host string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	a.serial++
	c := &x509.Certificate{
		SerialNumber: big.NewInt(a.serial), Subject: pkix.Name{CommonName: host}, DNSNames: []string{host},
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		NotBefore:   time.Now().Add(-time.Minute), NotAfter: time.Now().Add(time.Hour),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth},
	}
	if a.cert == nil {
		c.IsCA, c.BasicConstraintsValid, c.KeyUsage, c.ExtKeyUsage = true, true, x509.KeyUsageCertSign, nil
		a.cert, a.key = c, key
	}
	der, err := x509.CreateCertificate(rand.Reader, c, a.cert, key.Public(), a.key)
	if err != nil {
		t.Fatal(err)
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	for file, block := range map[string]*pem.Block{
		name + ".crt": {Type: "CERTIFICATE", Bytes: der},
		name + ".key": {Type: "PRIVATE KEY", Bytes: private},
	} {
		WriteFile(t, a.dir, file, string(pem.EncodeToMemory(block)))
	}
	if name == "ca" {
		if a.cert, err = x509.ParseCertificate(der); err != nil {
			t.Fatal(err)
		}
	}
}

// Client returns the TLS configuration of a client that trusts the authority.
func (a *Authority) Client() *tls.Config {
	pool := x509.NewCertPool()
	pool.AddCert(a.cert)
	return &tls.Config{RootCAs: pool}
}

// ClientWith returns the TLS configuration of a client that has a certificate too.
func (a *Authority) ClientWith(t *testing.T, name string) *tls.Config {
	t.Helper()
	cert, err := tls.LoadX509KeyPair(filepath.Join(a.dir, name+".crt"), filepath.Join(a.dir, name+".key"))
	if err != nil {
		t.Fatal(err)
	}
	c := a.Client()
	c.Certificates = []tls.Certificate{cert}
	return c
}
