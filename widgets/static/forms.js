// Controls that are plain html: what they ask for goes to the kernel, and replacing them keeps focus and place.

let pressed = null; // by the mouse: a browser tells no click of a button that was drawn again while it was pressed
document.addEventListener("pointerdown", ({ target, button, pointerType }) => {
  pressed = button === 0 && pointerType === "mouse" ? target.closest("button[data-act]") : null;
}, true);

// Send what a control asks for. `send(act, given)`.
export function listen(root, send) {
  const given = (control) => JSON.parse(control.dataset.given || "{}");
  root.addEventListener("click", (event) => {
    const control = event.target.closest("[data-act]");
    if (!control || !root.contains(control) || control.disabled || isField(control)) return;
    if (control.getAttribute("aria-disabled") === "true") return;
    if (control.hasAttribute("data-drives")) control.setAttribute("aria-disabled", "true"); // until it is answered
    if (!control.hasAttribute("data-takes")) return send(control.dataset.act, given(control));
    const field = control.closest("[data-row]").querySelector("input");
    delete field.dataset.typed; // its answer shows what holds
    send(control.dataset.act, { ...given(control), value: field.value });
  });
  root.addEventListener("pointerup", ({ target }) => {
    const [was, now] = [pressed, target.closest("button[data-act]")];
    pressed = null;
    if (now && was && !was.isConnected && keyOf(now) === keyOf(was)) now.click();
  });
  root.addEventListener("change", (event) => {
    const control = event.target.closest("[data-act]");
    if (!control || !isField(control)) return;
    if (isText(control) && control.dataset.typed === undefined) return; // it was sent already
    delete control.dataset.typed;
    const value = control.type === "checkbox" ? control.checked : control.value;
    send(control.dataset.act, { ...given(control), value });
  });
  // a browser tells no change of what was typed before its field was drawn again, nor at Enter inside JupyterLab
  const commit = ({ target }) => {
    if (target?.dataset?.typed !== undefined) target.dispatchEvent(new Event("change", { bubbles: true }));
  };
  root.addEventListener("input", ({ target }) => {
    if (isText(target)) target.dataset.typed = "";
  });
  root.addEventListener("focusout", commit);
  root.addEventListener("keydown", (event) => {
    // the field that is there by then: this one may have been drawn again
    if (event.key !== "Enter" || !isText(event.target)) return;
    setTimeout(() => {
      const field = fieldIn(root, keyOf(event.target));
      if (field?.dataset.act) commit({ target: field });
      else field?.closest("[data-row]")?.querySelector("[data-takes]")?.click();
    }, 0);
  });
  // what is no button but acts like one (a box of a drawing) hears Enter and the space bar
  root.addEventListener("keydown", (event) => {
    const control = event.target.closest("[data-act]");
    if (!control || control !== event.target || isField(control) || control.tagName === "BUTTON") return;
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      control.dispatchEvent(new MouseEvent("click", { bubbles: true }));
    }
  });
}

function isField(control) {
  return ["SELECT", "INPUT", "TEXTAREA"].includes(control.tagName);
}

function isText(control) {
  return isField(control) && control.tagName !== "SELECT" && control.type !== "checkbox";
}

// What names a control in one drawing and in the next.
function keyOf(element) {
  if (element.tagName === "SUMMARY") return wordsOf(element.parentNode);
  return element.id || element.dataset.key || (element.dataset.act || "") + (element.dataset.given || "");
}

// What a fold says, whatever it counts: "Metrics shown: 3 of 8" is the same one with 4 of 9.
function wordsOf(fold) {
  return fold.dataset.key || (fold.querySelector("summary")?.textContent || "").replace(/\d+/g, "#");
}

// The folds by their words, and a number where several say the same.
function foldsIn(root) {
  const folds = new Map();
  for (const fold of root.querySelectorAll("details")) {
    let n = 0;
    while (folds.has(`${wordsOf(fold)} ${n}`)) n += 1;
    folds.set(`${wordsOf(fold)} ${n}`, fold);
  }
  return folds;
}

function fieldIn(root, key) {
  return [...root.querySelectorAll("*")].find((element) => element.dataset && element.tagName !== "DETAILS" && keyOf(element) === key);
}

const drawn = new WeakMap();

// Replace the html of `root`; focus, the caret, what is open and what is scrolled stay as they were.
export function replace(root, html) {
  if (drawn.get(root) === html) return;
  const active = root.contains(document.activeElement) ? document.activeElement : null;
  const key = active && keyOf(active);
  const caret = active && isText(active) ? [active.selectionStart, active.selectionEnd] : null;
  const untouched = active && active.dataset.typed === undefined;
  const fields = [...root.querySelectorAll("input, textarea")]
    .filter((field) => isText(field) && (field === active || field.dataset.typed !== undefined))
    .map((field) => ({ name: keyOf(field), value: field.value, typed: field.dataset.typed !== undefined }));
  for (const field of root.querySelectorAll("[data-typed]")) delete field.dataset.typed; // those that go tell nothing
  const open = new Map([...foldsIn(root)].map(([words, fold]) => [words, fold.open]));
  const places = [...root.querySelectorAll("[data-scrolls]")].map((box) => [box.scrollLeft, box.scrollTop]);
  root.innerHTML = html;
  drawn.set(root, html);
  for (const [words, fold] of foldsIn(root)) fold.open = open.get(words) ?? fold.open;
  [...root.querySelectorAll("[data-scrolls]")].forEach((box, n) => {
    if (places.length > n) [box.scrollLeft, box.scrollTop] = places[n];
  });
  for (const { name, value, typed } of fields) {
    const again = fieldIn(root, name);
    if (!again || !isText(again)) continue;
    again.value = value;
    if (typed) again.dataset.typed = "";
  }
  const again = key ? fieldIn(root, key) : null;
  again?.focus({ preventScroll: true });
  if (!caret || !again || !isText(again)) return;
  if (caret[0] !== null) again.setSelectionRange(...caret);
  else if (untouched) again.select(); // a number field tells of no caret: what is typed next replaces it
}

// Grey what cannot act now, and say why. `blocked`: nothing acts; `busy`: nothing that runs stages does.
export function enable(root, blocked, busy) {
  for (const control of root.querySelectorAll("[data-act], [data-role]")) {
    const reason = blocked || (busy && control.hasAttribute("data-drives") ? `${busy} is under way` : "");
    if (control.dataset.was === undefined) {
      control.dataset.was = control.disabled ? "off" : "on";
      control.dataset.title = control.title || "";
    }
    const off = Boolean(reason) || control.dataset.was === "off";
    // what is greyed for a while keeps the focus, and what was typed: disabled, it would lose both to the notebook
    if (control.tagName === "BUTTON") control.setAttribute("aria-disabled", String(Boolean(reason)));
    else if (isText(control) && control.type !== "range") control.readOnly = Boolean(reason);
    else if ("disabled" in control) control.disabled = off;
    else control.setAttribute("aria-disabled", String(off));
    control.title = reason || control.dataset.title;
  }
}
