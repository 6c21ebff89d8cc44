// Refreshes the page without a flicker; without JavaScript the page reloads itself.
(() => {
  const every = 1000 * Number(document.documentElement.dataset.refresh);
  const stale = document.getElementById("stale");
  const refresh = async () => {
    const selecting = String(getSelection()) !== "";
    if (!document.hidden && !selecting) {
      try {
        const res = await fetch(location.pathname, {cache: "no-store", signal: AbortSignal.timeout(every)});
        if (!res.ok) throw new Error(res.status);
        const next = new DOMParser().parseFromString(await res.text(), "text/html");
        document.querySelector("main").replaceWith(document.adoptNode(next.querySelector("main")));
        document.title = next.title;
        stale.hidden = true;
      } catch {
        stale.hidden = false;
      }
    }
    setTimeout(refresh, every);
  };
  setTimeout(refresh, every);
})();
