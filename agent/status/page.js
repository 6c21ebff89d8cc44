// Refreshes the page without a flicker, also in a background tab, whose title tells what needs attention. Without JavaScript the page reloads
// itself.
(() => {
  const every = 1000 * Number(document.documentElement.dataset.refresh);
  let title = document.title; // of the last status
  let timer, loading = false;

  const load = async () => {
    const res = await fetch(location.pathname, {cache: "no-store", signal: AbortSignal.timeout(every)});
    if (!res.ok) throw new Error(res.status);
    const page = new DOMParser().parseFromString(await res.text(), "text/html");
    if (!page.querySelector("main")) throw new Error("not the agent's page");
    return page;
  };

  // A screen reader announces a notice when it appears, so one that is there is not written again.
  const notify = (id) => {
    for (const notice of document.querySelectorAll(".notice")) {
      const hidden = notice.id !== id;
      if (notice.hidden === hidden) continue;
      notice.querySelector("time").textContent = document.querySelector("nav time").textContent;
      notice.hidden = hidden;
    }
  };

  // New elements replace the links, and with them the focus.
  const replaceMain = (next) => {
    const main = document.querySelector("main");
    const focused = main.contains(document.activeElement) ? document.activeElement.id : "";
    main.replaceWith(document.adoptNode(next));
    if (focused) document.getElementById(focused)?.focus({preventScroll: true});
  };

  const refresh = async () => {
    if (loading) return;
    clearTimeout(timer);
    loading = true;
    const page = await load().catch(() => null);
    loading = false;
    if (page) {
      document.title = title = page.title;
      const selecting = String(getSelection()) !== ""; // a replaced text would lose the selection
      if (!selecting) replaceMain(page.querySelector("main"));
      notify(selecting ? "paused" : "");
    } else {
      document.title = "no response – " + title;
      notify("stale");
    }
    timer = setTimeout(refresh, every);
  };

  timer = setTimeout(refresh, every);
  // A browser may have stopped the timers of a tab in the background.
  document.addEventListener("visibilitychange", () => document.hidden || refresh());
})();
