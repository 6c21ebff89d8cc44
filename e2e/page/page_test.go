// Package page tests the status page of the built agent in a real Chromium.
package page

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/page"
	"github.com/chromedp/chromedp"

	"github.com/gpu-node-agent/gpu-node-agent/e2e/internal/node"
	"github.com/gpu-node-agent/gpu-node-agent/e2e/internal/process"
)

func TestMain(m *testing.M) { os.Exit(node.Main(m, nil)) }

// noticed is how long the page may take to show that the agent does not respond.
const noticed = 15 * time.Second

// browser is a Chromium with the agent's page in a tab.
type browser struct {
	*node.Node
	tab context.Context //nolint:containedctx // chromedp's handle of a tab
}

// newBrowser starts a Chromium. Without one the test fails: need.sh installs it.
func newBrowser(n *node.Node) browser {
	n.T.Helper()
	path, err := exec.LookPath("chromium")
	if err != nil {
		n.T.Fatalf("%v; e2e/page/need.sh installs Debian's package", err)
	}
	// Not chromedp's default options, which keep timers of background tabs running.
	options := []chromedp.ExecAllocatorOption{chromedp.ExecPath(path), chromedp.UserDataDir(n.T.TempDir())}
	for _, flag := range []string{
		"headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking", "disable-component-update",
		"disable-sync", "disable-dev-shm-usage",
	} {
		options = append(options, chromedp.Flag(flag, true))
	}
	allocator, cancel := chromedp.NewExecAllocator(n.T.Context(), options...)
	n.T.Cleanup(cancel)
	tab, cancel := chromedp.NewContext(allocator)
	n.T.Cleanup(cancel)
	b := browser{n, tab}
	b.run(chromedp.Navigate("http://" + n.Address + "/"))
	return b
}

func (b browser) run(action chromedp.Action[chromedp.Void]) {
	b.T.Helper()
	if err := chromedp.Do(b.tab, action); err != nil {
		b.T.Fatal(err)
	}
}

// do runs a script.
func (b browser) do(script string) {
	b.T.Helper()
	b.run(chromedp.Evaluate[chromedp.Void](script))
}

// hide opens another tab in the foreground.
func (b browser) hide() {
	b.T.Helper()
	other, cancel := chromedp.NewContext(b.tab, chromedp.WithNewWindow(false))
	b.T.Cleanup(cancel)
	browser{b.Node, other}.run(bringToFront())
	b.await("the tab is in the background", `document.visibilityState`, "hidden")
}

// show brings the tab to the foreground.
func (b browser) show() {
	b.T.Helper()
	b.run(bringToFront())
	b.await("the tab is in the foreground", `document.visibilityState`, "visible")
}

func bringToFront() chromedp.Action[chromedp.Void] {
	return chromedp.Func(func(ctx context.Context, t *chromedp.Target) error {
		_, err := cdp.Call(ctx, t, page.BringToFront, cdp.Empty{})
		return err
	})
}

// await waits until an expression has a text.
func (b browser) await(what, expression, want string) {
	b.T.Helper()
	b.awaitWithin(node.Timeout, what, expression, func(got string) bool { return got == want })
}

// awaitTitle waits until the title has all of these texts.
func (b browser) awaitTitle(texts ...string) {
	b.T.Helper()
	b.awaitWithin(node.Timeout, "the title has "+strings.Join(texts, ", "), `document.title`, func(title string) bool {
		for _, text := range texts {
			if !strings.Contains(title, text) {
				return false
			}
		}
		return true
	})
}

func (b browser) awaitWithin(limit time.Duration, what, expression string, matches func(string) bool) {
	b.T.Helper()
	took, err := process.Await(b.T.Context(), limit, func(context.Context) error {
		got, err := chromedp.Run(b.tab, chromedp.Evaluate[string]("String("+expression+")")) //nolint:contextcheck // a tab is a context
		if err == nil && !matches(got) {
			err = fmt.Errorf("%s is %q", expression, got)
		}
		return err
	})
	if err != nil {
		b.T.Fatalf("waiting until %s: %v", what, err)
	}
	b.T.Logf("%-70s %5.2fs", what, took.Seconds())
}

const stale = `!document.getElementById("stale").hidden`

func TestPage(t *testing.T) {
	n := node.New(t) // without a kubelet
	n.Configure("source: {stallAfter: 1s, sim: {profile: h100-8}}\n")
	n.StartAgent()
	n.Inject("{gpu: 3, lost: true}")
	n.Inject("{gpu: 5, lost: true}")
	n.Eventually("two GPUs are lost", func() error {
		text, err := n.Page("/", http.StatusOK)
		if err == nil && !strings.Contains(text, "2 unhealthy") {
			err = errors.New(text)
		}
		return err
	})
	b := newBrowser(n)
	b.awaitTitle("2 unhealthy", "not registered")

	b.do(`document.querySelector('a[href="#gpu-5"]').focus()`)
	b.do(`window.redraws = 0; new MutationObserver(() => window.redraws++).observe(document.body, {childList: true})`)
	b.await("3 redraws", `window.redraws >= 3`, "true")
	b.await("the link has the focus", `document.activeElement.getAttribute("href")`, "#gpu-5")

	// In the background the title follows, also while text is selected.
	b.do(`getSelection().selectAllChildren(document.querySelector("h1"))`)
	selected := `String(getSelection()) === document.querySelector("h1").textContent && String(getSelection()) !== ""`
	b.hide()
	n.Inject("{source: stalled}")
	b.awaitTitle("2 unhealthy", "stalled", "not registered")
	b.await("text is selected", selected, "true")
	b.await("the notice of a page that stands still", `!document.getElementById("paused").hidden`, "true")
	b.await("no notice of an agent that does not respond", stale, "false")

	n.KillAgent()
	b.awaitWithin(noticed, "the banner", stale, func(shown string) bool { return shown == "true" })
	b.awaitWithin(noticed, "the title", `document.title`, func(title string) bool {
		return strings.HasPrefix(title, "no response") && strings.Contains(title, "2 unhealthy")
	})
	b.await("text is selected", selected, "true")
	b.await("one notice", `document.getElementById("paused").hidden`, "true")

	n.StartAgent()
	b.await("no banner", stale, "false")
	b.show()
	b.do(`getSelection().removeAllRanges()`)
	b.await("the page goes on", `document.querySelectorAll(".notice:not([hidden])").length`, "0")
}
