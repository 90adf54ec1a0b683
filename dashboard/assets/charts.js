// Draws charts when they come in sight: what nobody looks at costs nothing but its bytes.
(() => {
  "use strict";

  const CONFIG = { displayModeBar: false, doubleClick: false, showTips: false };
  const NEAR_PX = 150;
  const places = new Map();  // where a chart stands: its figure; until it is drawn, `waits`; what is drawn, as text

  function draw(place) {
    const known = places.get(place);
    if (!known.waits) return;
    known.waits = false;
    const { data, layout } = known.figure, shapes = JSON.stringify(layout.shapes);
    const rest = JSON.stringify([data, { ...layout, shapes: null }]);
    if (rest !== known.rest) window.Plotly.react(place, data, layout, CONFIG);
    else if (shapes !== known.shapes) window.Plotly.relayout(place, { shapes: layout.shapes });
    if (known.rest === undefined) begin(place, known);
    Object.assign(known, { rest, shapes });
  }

  function begin(place, known) {
    // What was dragged or selected is no longer what was drawn.
    place.on("plotly_relayout", (event) => { if (event["xaxis.range[0]"] !== undefined) known.rest = null; });
    place.on("plotly_selected", () => { known.rest = null; });
    place.dispatchEvent(new CustomEvent("chart", { bubbles: true }));
  }

  function within(place, margin) {
    const box = place.getBoundingClientRect();
    return box.bottom > -margin && box.top < window.innerHeight + margin;
  }

  function drawThose(margin) {
    const wanted = [...places.keys()].filter((place) => within(place, margin));
    for (const place of wanted) draw(place);
  }

  function fit(place) {
    const full = place._fullLayout;
    if (full && place.clientWidth && (full.width !== place.clientWidth || full.height !== place.clientHeight)) window.Plotly.relayout(place, { autosize: true });
  }

  const scrolled = new IntersectionObserver((seen) => { for (const each of seen) if (each.isIntersecting) draw(each.target); }, { rootMargin: `${NEAR_PX}px` });
  const resized = new ResizeObserver((seen) => { for (const each of seen) fit(each.target); });

  function forget(place) {
    scrolled.unobserve(place);
    resized.unobserve(place);
    window.Plotly.purge(place);
    places.delete(place);
  }

  // Figures by name of the chart: those in sight are drawn before this returns.
  function show(figures) {
    for (const place of [...places.keys()]) if (!place.isConnected) forget(place);
    for (const place of document.querySelectorAll(".chart > .plot")) {
      if (!places.has(place)) {
        places.set(place, { waits: false });
        scrolled.observe(place);
        resized.observe(place);
      }
      const figure = figures[place.parentElement.dataset.chart];
      if (figure) Object.assign(places.get(place), { figure, waits: true });
    }
    drawThose(0);
    requestIdleCallback(() => drawThose(NEAR_PX));
  }

  // Names of the charts whose figures are still being worked out.
  function pending() {
    return [...places].filter(([, known]) => known.figure?.layout.meta.pending).map(([place]) => place.parentElement.dataset.chart);
  }

  window.addEventListener("beforeprint", () => { for (const place of places.keys()) draw(place); });

  window.charts = { show, pending };
})();
