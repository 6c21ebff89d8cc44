package status

import (
	"bytes"
	"crypto/sha256"
	_ "embed" // the page's parts
	"encoding/base64"
	"encoding/json"
	"fmt"
	"html/template"
	"net/http"
	"time"

	"go.uber.org/zap"
)

// The page's parts. Nothing comes from elsewhere: a node may reach no other place.
var (
	//go:embed page.html.tmpl
	statusHTML string
	//go:embed page.css
	statusCSS string
	//go:embed page.js
	statusJS string
)

const (
	pageEvents   = 30 // how many events the page shows
	pageTroubles = 8  // how many devices it lists at the top
	pageHolders  = 6  // how many containers it names for one device
	pageWarnings = 8  // about devices that are not offered
	pageRefresh  = 5  // seconds
)

// Pages serve what is known, for people and for programs.
type Pages struct {
	status func() Node
	log    *zap.Logger
	page   *template.Template
	policy string
}

// findingData is what the template of a finding is given.
type findingData struct {
	Now time.Time
	F   Finding
}

// NewPages returns the pages of the status that build returns.
func NewPages(status func() Node, log *zap.Logger) *Pages {
	page := template.Must(template.New("status").Funcs(template.FuncMap{
		"css": func() template.CSS { return template.CSS(statusCSS) }, "js": func() template.JS { return template.JS(statusJS) },
		"refresh": func() int { return pageRefresh },
		"percent": percentText, "celsius": celsiusText, "watts": wattsText, "mhz": mhzText,
		"memory": memoryText, "memoryPercent": memoryPercent, "width": width, "age": ageText, "for": forText, "clock": clockText,
		"allocations": allocationsText, "off": offText, "mismatches": mismatchesText, "xids": xidsText, "versions": versionsText, "clears": clearsText, "own": own, "heldMIG": heldMIG, "name": Device.Name, "number": indexText, "eventIndex": eventIndexText,
		"troubles": troubles, "counts": stateCounts, "plural": plural,
		"api": apiText, "apiErrors": apiErrors, "memoryTrouble": memoryTrouble, "configTrouble": configTrouble,
		"finding": func(now time.Time, f Finding) findingData { return findingData{now, f} },
		"holders": func(h []Holder) []string { return HolderNames(h, pageHolders) },
		"inUse": func(s Node) string {
			held, all := inUse(s)
			return fmt.Sprintf("%d of %d", held, all)
		},
		"warnings": func(k Kubelet) []string { return firstOf(k.Warnings, pageWarnings) },
		"worst":    func(all []trouble) []trouble { return all[:min(len(all), pageTroubles)] },
		"newest":   func(all []Event) []Event { return all[:min(len(all), pageEvents)] },
	}).Parse(statusHTML))
	return &Pages{
		status: status, log: log, page: page,
		policy: fmt.Sprintf("default-src 'none'; style-src 'sha256-%s'; script-src 'sha256-%s'; connect-src 'self'; "+
			"base-uri 'none'; form-action 'none'; frame-ancestors 'self'", hash(statusCSS), hash(statusJS)),
	}
}

func hash(text string) string {
	sum := sha256.Sum256([]byte(text))
	return base64.StdEncoding.EncodeToString(sum[:])
}

// width is how long a bar is, of 100; -1 if its value is not known.
func width(percent *float64) float64 {
	if percent == nil {
		return -1
	}
	return max(0, min(100, *percent))
}

// ServeHTML serves the status page.
func (p *Pages) ServeHTML(w http.ResponseWriter, _ *http.Request) {
	var b bytes.Buffer
	err := p.page.Execute(&b, p.status())
	w.Header().Set("Content-Security-Policy", p.policy)
	w.Header().Set("Referrer-Policy", "no-referrer")
	p.answer(w, "text/html; charset=utf-8", b.Bytes(), err)
}

// ServeJSON serves the status as JSON.
func (p *Pages) ServeJSON(w http.ResponseWriter, _ *http.Request) {
	text, err := json.Marshal(p.status())
	p.answer(w, "application/json", append(text, '\n'), err)
}

// answer writes a whole answer, so that a fault in it is no half page.
func (p *Pages) answer(w http.ResponseWriter, kind string, text []byte, err error) {
	w.Header().Set("Cache-Control", "no-store")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	if err != nil {
		p.log.Error("status page", zap.Error(err))
		http.Error(w, "the page cannot be shown; the agent's log says why", http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", kind)
	w.Header().Set("Content-Length", fmt.Sprint(len(text)))
	_, _ = w.Write(text) // the client may be gone
}
