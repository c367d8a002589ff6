import { post } from "../api.js";
import { h } from "../dom.js";
import { field, problem } from "../parts.js";

/** The way in. */
export function login(done) {
  const password = h("input", { type: "password", name: "password", autocomplete: "current-password", required: true, autofocus: true });
  const trouble = h("div");
  const button = h("button", { class: "primary" }, "Log in");
  const form = h("form", { class: "card" },
    h("div", { class: "brand" }, h("img", { src: "/static/icon.svg", alt: "" }), "OrbitMQ console"),
    field("Password", password), trouble, button);
  form.onsubmit = async (event) => {
    event.preventDefault();
    button.disabled = true;
    try {
      await done(await post("/login", { password: password.value }));
    } catch (error) {
      trouble.replaceChildren(problem(error));
      password.select();
    } finally {
      button.disabled = false;
    }
  };
  return h("div", { class: "gate" }, form);
}
