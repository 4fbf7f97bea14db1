// Reads the page again every five seconds and puts the new state in place of the old one. The page is complete
// without it.
"use strict";
(() => {
  const EVERY = 5000;
  let failures = 0;
  const say = (text) => {
    const fresh = document.getElementById("fresh");
    if (fresh) fresh.textContent = text;
  };
  // A reader who selects text or has opened a list must not lose it.
  const isBusy = () => {
    const selection = window.getSelection();
    const main = document.getElementById("main");
    const focus = document.activeElement;
    return (selection && !selection.isCollapsed)
      || (main && focus && focus !== main && main.contains(focus));
  };
  const refresh = async () => {
    if (document.hidden || isBusy()) return;
    try {
      const answer = await fetch(location.href, { cache: "no-store" });
      if (!answer.ok) throw new Error("status " + answer.status);
      const next = new DOMParser().parseFromString(await answer.text(), "text/html");
      for (const id of ["top", "main"]) {
        const [here, there] = [document.getElementById(id), next.getElementById(id)];
        if (!here || !there) throw new Error("another page");
        for (const open of here.querySelectorAll("details[open][id]")) {
          const same = there.querySelector("#" + CSS.escape(open.id));
          if (same) same.open = true;
        }
        here.replaceChildren(...there.childNodes);
      }
      document.title = next.title;
      document.body.classList.remove("lost");
      failures = 0;
      say("Refreshed every 5 s.");
    } catch (error) {
      failures += 1;
      document.body.classList.add("lost");
      say("The gateway does not answer (" + error.message + "); this page shows old data. Attempts: " + failures + ".");
    }
  };
  say("Refreshed every 5 s.");
  setInterval(refresh, EVERY);
})();
