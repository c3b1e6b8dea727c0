// Shows the one decoded prompt that the controls (or the address) name.
// Without this script the page shows the first prompt under every method.
"use strict";
(() => {
  const articles = [...document.querySelectorAll("article.decode")];
  const form = document.querySelector("form.controls");

  // Scrolls the text, and not the page, to one serial call.
  const reveal = (mark) => {
    const text = mark?.closest(".text");
    if (text) text.scrollTop = mark.offsetTop - text.clientHeight / 2;
  };

  const show = () => {
    const { prompt, method } = Object.fromEntries(new FormData(form));
    for (const article of articles) {
      const { prompt: p, method: m } = article.dataset;
      article.hidden = p !== prompt || m !== method;
    }
    const shown = articles.find((article) => !article.hidden);
    document.querySelector(".no-record").hidden = Boolean(shown);
    reveal(shown?.querySelector("mark"));
    return `#${new URLSearchParams({ prompt, method })}`;
  };

  const readAddress = () => {
    const address = new URLSearchParams(location.hash.slice(1));
    for (const option of form.querySelectorAll("option"))
      if (option.value === address.get("prompt")) option.selected = true;
    for (const input of form.querySelectorAll("input"))
      if (input.value === address.get("method")) input.checked = true;
    show();
  };

  if (form) {
    form.addEventListener("change", () => history.replaceState(null, "", show()));
    addEventListener("hashchange", readAddress);
    readAddress();
    // A step and the text that it gave light up together.
    document.addEventListener("pointerover", ({ target }) => {
      for (const lit of document.querySelectorAll(".lit")) lit.classList.remove("lit");
      const part = target.closest("article.decode [data-step]");
      if (!part) return;
      const same = `[data-step="${part.dataset.step}"]`;
      for (const twin of part.closest("article").querySelectorAll(same)) {
        twin.classList.add("lit");
        if (part.matches("li")) reveal(twin.closest("mark"));
      }
    });
  }
  document.documentElement.dataset.ready = "true";
})();
