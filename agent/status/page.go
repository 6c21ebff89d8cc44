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

	"github.com/gpu-node-agent/gpu-node-agent/agent/view"
)

// The parts of the page. It loads nothing from other hosts: the browser or the node may have no Internet access.
var (
	//go:embed page.html.tmpl
	statusHTML string
	//go:embed page.css
	statusCSS string
	//go:embed page.js
	statusJS string
)

const (
	maxPageEvents    = 30
	maxFaultGroups   = 8 // at the top of the page
	maxFaultyDevices = 8 // in one of them
	maxHolders       = 6 // of one device
	maxProblems      = 8 // of one part
	refreshSeconds   = 5
)

// Pages serves the status as a page and as JSON.
type Pages struct {
	build   func() Node
	history *History
	log     *zap.Logger
	page    *template.Template
	policy  string // Content-Security-Policy
}

// findingData is the input of the template of findings with one action.
type findingData struct {
	Now      time.Time
	Findings []Finding
}

// NewPages returns the pages of the status that build returns, with charts of the history.
func NewPages(build func() Node, history *History, log *zap.Logger) *Pages {
	page := template.Must(template.New("status").Funcs(template.FuncMap{
		"css": func() template.CSS { return template.CSS(statusCSS) }, "js": func() template.JS { return template.JS(statusJS) },
		"refresh": func() int { return refreshSeconds },
		"mhz":     mhzText, "memory": memoryText, "memoryPercent": memoryPercent, "width": barWidth, "age": ageText, "for": forText,
		"clock":       clockText,
		"allocations": allocationsText, "pluginOff": pluginOffText, "incident": incidentText, "xidGap": xidGapText,
		"xids": xidsText, "versions": versionsText, "clears": clearsText, "heldMIG": heldMIG, "name": Device.Name, "number": indexText,
		"eventIndex": eventIndexText, "inUse": inUseText, "notMeasured": notMeasuredText,
		"findings": func(gpu, d Device) [][]Finding { return groupFindings(ownFindings(gpu, d)) },
		"title":    titleText, "faultGroups": faultGroups, "counts": stateCounts, "plural": Plural[int],
		"dra": draText, "claims": preparedTexts, "api": apiText, "object": nodeObjectText,
		"problems": func(s Node) []view.Problem { return shownProblems(s.Problems) },
		"finding":  func(now time.Time, f []Finding) findingData { return findingData{now, f} },
		"holders":  func(h []Holder) []string { return heldByTexts(h, maxHolders) },
		"usage":    func(d Device) []string { return usageTexts(d, maxHolders) },
		"shares":   func(d Device) string { return sharesText(d, true) },
		"limits":   func(d Device) []string { return memoryLimitTexts(d, maxHolders) },
		"worst":    func(all []faultGroup) []faultGroup { return all[:min(len(all), maxFaultGroups)] },
		"newest":   func(all []Event) []Event { return all[:min(len(all), maxPageEvents)] },
	}).Parse(statusHTML))
	return &Pages{
		build: build, history: history, log: log, page: page,
		policy: fmt.Sprintf("default-src 'none'; style-src 'sha256-%s'; script-src 'sha256-%s'; connect-src 'self'; "+
			"base-uri 'none'; form-action 'none'; frame-ancestors 'self'", cspHash(statusCSS), cspHash(statusJS)),
	}
}

func cspHash(text string) string {
	sum := sha256.Sum256([]byte(text))
	return base64.StdEncoding.EncodeToString(sum[:])
}

// barWidth returns the length of a bar from 0 to 100, or -1 for an unknown value.
func barWidth(percent *float64) float64 {
	if percent == nil {
		return -1
	}
	return max(0, min(100, *percent))
}

// ServeHTML serves the status page.
func (p *Pages) ServeHTML(w http.ResponseWriter, _ *http.Request) {
	s := p.build()
	p.history.draw(&s)
	var b bytes.Buffer
	err := p.page.Execute(&b, s)
	w.Header().Set("Content-Security-Policy", p.policy)
	w.Header().Set("Referrer-Policy", "no-referrer")
	p.respond(w, "text/html; charset=utf-8", b.Bytes(), err)
}

// ServeJSON serves the status as JSON.
func (p *Pages) ServeJSON(w http.ResponseWriter, _ *http.Request) {
	text, err := json.Marshal(p.build())
	p.respond(w, "application/json", append(text, '\n'), err)
}

// respond writes a complete response, or an error: never a part of a page.
func (p *Pages) respond(w http.ResponseWriter, kind string, text []byte, err error) {
	w.Header().Set("Cache-Control", "no-store")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	if err != nil {
		p.log.Error("cannot build the status page", zap.Error(err))
		http.Error(w, "cannot build the page; see the agent's log", http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", kind)
	w.Header().Set("Content-Length", fmt.Sprint(len(text)))
	_, _ = w.Write(text) // the client may have disconnected
}
