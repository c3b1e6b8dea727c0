// The menu of a narrow page closes when it was used; the contents of a wide one mark
// the section that is being read.
"use strict";
(() => {
  const menu = document.querySelector("details.menu");
  menu?.addEventListener("click", ({ target }) => {
    if (target.closest("a")) menu.open = false;
  });
  const links = [...document.querySelectorAll("nav.toc a")];
  const headings = links.map((link) => document.getElementById(link.hash.slice(1)));
  const mark = () => {
    const passed = headings.filter((h) => h.getBoundingClientRect().top < innerHeight / 3);
    const index = Math.max(passed.length - 1, 0);
    links.forEach((link, other) => link.classList.toggle("here", other === index));
    const title = document.querySelector(".menu .here-title");
    if (title) title.textContent = headings[index]?.textContent ?? "";
  };
  let waiting = false;
  addEventListener("scroll", () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      mark();
    });
  }, { passive: true });
  mark();
  document.documentElement.dataset.ready = "true";
})();
