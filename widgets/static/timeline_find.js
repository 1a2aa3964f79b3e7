// The field of the timeline that searches for spans: the kernel finds them, and goes from one to the next.
import { make } from "./dom.js";

const FIND_HELP = "a part of a stage, role or kind; role:critic kind:forward; cell:3. Enter: next, Shift Enter: previous";
const TYPING_MS = 300; // without a key, until the kernel searches

// back(): the focus goes there from the field.
export function mountFind(tools, send, back) {
  let typing = 0;
  const field = make("input", { type: "search", size: "22", placeholder: "stage, role, kind or cell:3", title: FIND_HELP });
  const told = make("span", { class: "wb-tl-told", role: "status" });
  const search = (by = 0) => {
    clearTimeout(typing);
    send("find", { value: field.value, by });
  };
  tools.append(make("label", {}, "find ", field));
  for (const [sign, label, by] of [["◂", "previous match", -1], ["▸", "next match", 1]]) {
    const control = make("button", { type: "button", "aria-label": label, title: label }, sign);
    control.addEventListener("click", () => search(by));
    tools.append(control);
  }
  tools.append(told);
  field.addEventListener("input", () => {
    clearTimeout(typing);
    typing = setTimeout(search, TYPING_MS);
  });
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter") search(event.shiftKey ? -1 : 1);
    if (event.key !== "Escape") return;
    field.value = "";
    search();
    back();
  });
  return {
    draw(data) {
      if (document.activeElement !== field) field.value = data.query;
      if (told.textContent !== data.told) told.textContent = data.told;
    },
    focus() {
      field.focus();
      field.select();
    },
    end: () => clearTimeout(typing),
  };
}
