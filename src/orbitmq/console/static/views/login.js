import { me, post } from "../api.js";
import { h } from "../dom.js";
import { field, problem } from "../parts.js";
import { t } from "../words.js";

/** The way in. */
export function login(done) {
  const user = me.users && h("input", { name: "username", autocomplete: "username", autocapitalize: "none", spellcheck: "false", required: true, autofocus: true });
  const password = h("input", { type: "password", name: "password", autocomplete: "current-password", required: true, autofocus: !user });
  const trouble = h("div");
  const button = h("button", { class: "primary" }, t("Log in"));
  const hasForm = me.users || !me.provider;
  const form = h("form", { class: "card" },
    h("div", { class: "brand" }, h("img", { src: "/static/icon.svg", alt: "" }), t("OrbitMQ console")),
    hasForm && [user && field(t("User"), user), field(t("Password"), password), trouble, button],
    // Another site answers: the browser leaves the page.
    me.provider && h("a", { class: `button ${hasForm ? "" : "primary"}`, href: "/login/oidc", rel: "external" }, t("Log in with {}", me.provider)));
  form.onsubmit = async (event) => {
    event.preventDefault();
    button.disabled = true;
    try {
      await done(await post("/login", { password: password.value, ...(user ? { user: user.value.trim() } : {}) }));
    } catch (error) {
      trouble.replaceChildren(problem(error));
      password.select();
    } finally {
      button.disabled = false;
    }
  };
  return h("div", { class: "gate" }, form);
}
