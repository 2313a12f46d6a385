const { view, plots } = JSON.parse(document.getElementById("data").textContent);
const round = value => value.toLocaleString("en", { maximumSignificantDigits: 5 });
const time = seconds => {
  const whole = Math.round(seconds), hours = Math.floor(whole / 3600), minutes = Math.floor(whole / 60) % 60;
  if (hours) return hours + " h " + minutes + " min";
  return minutes ? minutes + " min " + whole % 60 + " s" : round(seconds) + " s";
};
const where = {
  step: () => "",
  tokens: tokens => ", " + tokens.toLocaleString("en") + " tokens",
  time: seconds => ", " + time(seconds),
};
for (const [key, curves] of Object.entries(plots)) {
  const figure = document.getElementById("plot-" + key);
  const tip = figure.appendChild(document.createElement("div"));
  tip.className = "tip";
  tip.hidden = true;
  for (const svg of figure.querySelectorAll("svg[data-axis]")) {
    const axis = svg.dataset.axis, cursor = svg.querySelector(".cursor");
    const hide = () => { tip.hidden = true; cursor.style.visibility = "hidden"; };
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("pointermove", event => {
      const box = svg.getBoundingClientRect();
      const x = (event.clientX - box.left) / box.width * view.width - view.left;
      if (x < 0 || x > view.inner) return hide();
      const place = x / view.inner * view.last[axis];
      tip.textContent = curves.map(curve => {
        const places = axis === "step" ? curve.steps : curve[axis];
        let near = -1;
        places.forEach((other, i) => {
          if (other !== null && (near < 0 || Math.abs(other - place) < Math.abs(places[near] - place))) near = i;
        });
        if (near < 0) return "";
        const value = (curve.name + " " + round(curve.values[near])).trim();
        return value + ", step " + curve.steps[near].toLocaleString("en") + where[axis](places[near]);
      }).filter(line => line).join("\n");
      tip.hidden = !tip.textContent;
      const left = event.clientX - figure.getBoundingClientRect().left;
      const aside = left > box.width / 2 ? left - tip.offsetWidth - 12 : left + 12;
      tip.style.left = Math.max(0, Math.min(aside, box.width - tip.offsetWidth)) + "px";
      cursor.style.visibility = "visible";
      cursor.setAttribute("transform", "translate(" + x + ")");
    });
  }
}
