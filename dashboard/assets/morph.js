// Makes the content of an element what some HTML says, and keeps what is alike: where one is, what is open or scrolled.
(() => {
  "use strict";

  function morph(element, html) {
    if (!element) return;
    const made = document.createElement("template");
    made.innerHTML = html;
    children(element, made.content);
  }

  function children(element, made) {
    const before = [...element.childNodes], after = [...made.childNodes];
    after.forEach((node, place) => {
      const here = before[place];
      if (!here) element.append(node);
      else if (here.nodeName !== node.nodeName || here.id !== node.id) here.replaceWith(node);
      else become(here, node);
    });
    for (const rest of before.slice(after.length)) rest.remove();
  }

  function become(here, node) {
    if (here.nodeType !== Node.ELEMENT_NODE) {
      if (here.nodeValue !== node.nodeValue) here.nodeValue = node.nodeValue;
      return;
    }
    if (here.isEqualNode(node)) return;
    for (const { name } of [...here.attributes]) if (!node.hasAttribute(name) && name !== "open") here.removeAttribute(name);
    for (const { name, value } of node.attributes) if (here.getAttribute(name) !== value) here.setAttribute(name, value);
    children(here, node);
    if (here.nodeName === "SELECT" && here.value !== node.value) here.value = node.value;
  }

  window.morph = morph;
})();
