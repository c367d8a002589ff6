import { get, me, patch, post, remove } from "../api.js";
import { h, path } from "../dom.js";
import * as f from "../format.js";
import { act, card, dialog, field, head, problem, table, toast } from "../parts.js";
import { t } from "../words.js";

/** Who may log in, as what, and who is logged in. */
export async function access() {
  let content = await get("/access");
  const look = async () => {
    content = await get("/access");
    dispatchEvent(new Event("console:redraw"));
  };
  return {
    title: t("Users"),
    draw: () => [
      head(t("Users"), { sub: t("Who may log in to this console, and who is logged in."),
        actions: content.users && [h("button", { type: "button", class: "primary", onclick: () => addDialog(content.roles, look) }, t("New user"))] }),
      h("div", { class: "stack" },
        content.users && card(t("Users"), table([
          [t("User"), (row) => row.name, "name"],
          [t("Role"), (row) => row.role],
          ["", (row) => h("div", { class: "row" },
            h("button", { type: "button", onclick: () => changeDialog(row, content.roles, look) }, t("Change")),
            h("button", { type: "button", class: "danger", onclick: () => removeDialog(row, look) }, t("Remove"))), "act"],
        ], content.users, { label: t("Users"), empty: t("No users.") })),
        card(t("Sessions"), table([
          [t("User"), (row) => [row.user ?? "–", row.via && h("span", { class: "muted" }, t(" by {}", row.via))], "name"],
          [t("Role"), (row) => row.role ?? "–"],
          [t("Since"), (row) => f.when(row.since), "nowrap opt"],
          [t("Address"), (row) => row.address, "opt"],
          ["", (row) => (row.is_mine ? h("span", { class: "muted" }, t("this one")) : endButton(row, look)), "act"],
        ], content.sessions, { label: t("Sessions"), empty: t("Nobody is logged in.") })),
        card(t("What a role may do"), table([
          ["", (row) => row.about, "name"],
          ...content.roles.map((role) => [role, (row) => (content.roles.indexOf(role) >= content.roles.indexOf(row.least) ? t("yes") : "–")]),
        ], content.rules, { label: t("What a role may do") }))),
    ],
    refresh: async () => { content = await get("/access"); },
  };
}

function endButton(session, look) {
  const button = h("button", { type: "button", class: "danger" }, t("End"));
  button.onclick = () => act(button, async () => {
    await remove(path("access", "sessions", session.id));
    toast(t("The session has ended"));
    await look();
  });
  return button;
}

function roleChoice(roles, role) {
  const choice = h("select", null, roles.map((each) => h("option", { value: each }, each)));
  choice.value = role;
  return choice;
}

const newPassword = (required) => h("input", { type: "password", autocomplete: "new-password", minlength: 8, required });

/** A form in a window, which closes when what it asked for is done. */
function asking(title, fields, label, send, look) {
  const trouble = h("div");
  const button = h("button", { class: "primary" }, label);
  const form = h("form", { class: "stack" }, fields, trouble, h("footer", null, button));
  form.onsubmit = async (event) => {
    event.preventDefault();
    button.disabled = true;
    try {
      toast((await send()).outcome);
      opened.close();
      await look();
    } catch (error) {
      trouble.replaceChildren(problem(error));
    } finally {
      button.disabled = false;
    }
  };
  const opened = dialog(title, form);
}

function addDialog(roles, look) {
  const name = h("input", { autocomplete: "off", autocapitalize: "none", spellcheck: "false", required: true });
  const role = roleChoice(roles, "reader");
  const password = newPassword(true);
  asking(t("New user"), h("div", { class: "form" }, field(t("Name"), name, "wide"), field(t("Role"), role), field(t("Password, 8 characters or more"), password)), t("Add"),
    async () => {
      const answer = await post("/access/users", { name: name.value.trim(), role: role.value, password: password.value });
      return { outcome: `${name.value.trim()}: ${answer.outcome}` };
    }, look);
}

function changeDialog(user, roles, look) {
  const role = roleChoice(roles, user.role);
  const password = newPassword(false);
  asking(t("Change {}", user.name), [
    h("p", { class: "muted" }, user.name === me.user ? t("A change ends your sessions: log in again afterwards.") : t("A change ends the sessions of the user.")),
    h("div", { class: "form" }, field(t("Role"), role), field(t("Another password; empty: the same"), password)),
  ], t("Change"), async () => {
    const wanted = { ...(role.value === user.role ? {} : { role: role.value }), ...(password.value ? { password: password.value } : {}) };
    const answer = await patch(path("access", "users", user.name), wanted);
    return { outcome: `${user.name} ${answer.outcome}` };
  }, look);
}

/** Another password for the user of this page. */
export function passwordDialog() {
  const current = h("input", { type: "password", autocomplete: "current-password", required: true });
  const password = newPassword(true);
  asking(t("Change password"), [
    h("p", { class: "muted" }, t("Your other sessions end.")),
    h("div", { class: "form" }, field(t("Present password"), current), field(t("Password, 8 characters or more"), password)),
  ], t("Change"), async () => {
    // Until the answer is here, what is asked for meanwhile belongs to a session that has ended.
    me.changing = true;
    try {
      Object.assign(me, await post("/password", { current: current.value, password: password.value }));
    } finally { me.changing = false; }
    return { outcome: t("Your password was changed") };
  }, async () => {});
}

function removeDialog(user, look) {
  asking(t("Remove {}", user.name), h("p", null, t("The sessions of the user end at once.")), t("Remove"), async () => {
    const answer = await remove(path("access", "users", user.name));
    return { outcome: `${user.name}: ${answer.outcome}` };
  }, look);
}
