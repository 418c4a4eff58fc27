// What the words on the page mean: a tooltip, by mouse, touch and keyboard, which screen readers read as a description.

// A word with its tooltip; the key is what paceline.tools.report.terms calls it.
function term(text, key = text.toLowerCase()) {
  const button = make("button", { type: "button", class: "term", "data-term": key }, text);
  button.setAttribute("aria-describedby", describedBy(key));
  const show = () => {
    const box = button.getBoundingClientRect();
    showTip([report.terms[key]], box.left - 14, box.bottom - 12);
  };
  for (const name of ["pointerenter", "focus", "click"]) button.addEventListener(name, show);
  for (const name of ["pointerleave", "blur"]) button.addEventListener(name, () => showTip(null));
  return button;
}

const describedBy = (key) => `term-${Object.keys(report.terms).indexOf(key)}`;

// The words of the template, and the list of all of them.
function writeTerms() {
  for (const element of document.querySelectorAll("[data-term]:not(button)")) {
    const [word, ...rest] = element.textContent.split(/(?=:)/);
    element.replaceChildren(term(word.trim(), element.dataset.term), ...rest);
    element.removeAttribute("data-term");
  }
  $("terms").replaceChildren(...Object.entries(report.terms).map(([key, meaning]) =>
    make("div", {}, make("dt", {}, key), make("dd", { id: describedBy(key) }, meaning))));
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") showTip(null);
  });
}
