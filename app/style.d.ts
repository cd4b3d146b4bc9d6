// endpoint.py makes this module from board.css and the library's sheet.
declare const sheet: string;
export default sheet;
