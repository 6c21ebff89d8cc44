// Refreshes the page without a flicker; without JavaScript the page reloads itself.
(() => {
  const every = 1000 * Number(document.documentElement.dataset.refresh);
  const late = document.getElementById("late");
  const refresh = async () => {
    const reading = String(getSelection()) !== "";
    if (!document.hidden && !reading) {
      try {
        const res = await fetch(location.pathname, {cache: "no-store", signal: AbortSignal.timeout(every)});
        if (!res.ok) throw new Error(res.status);
        const next = new DOMParser().parseFromString(await res.text(), "text/html");
        document.querySelector("main").replaceWith(document.adoptNode(next.querySelector("main")));
        document.title = next.title;
        late.hidden = true;
      } catch {
        late.hidden = false;
      }
    }
    setTimeout(refresh, every);
  };
  setTimeout(refresh, every);
})();
