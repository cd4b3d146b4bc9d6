// endpoint.py makes this module from the style sheets and the library's own.
declare const sheet: string;
export default sheet;
/** Of tables, and of the first picture of a page. */
export const TABLE: string, FIRST: string;
